// crossdock._core.constants: the headers' numbers and words for Python, where nothing repeats them.
#pragma once

#include <nanobind/nanobind.h>

namespace xdpy {

void bind_constants(nanobind::module_& module);

}  // namespace xdpy
