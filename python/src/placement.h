// The planner of placements.
#pragma once

#include <nanobind/nanobind.h>

namespace xdpy {

void bind_placement(nanobind::module_& module);

}  // namespace xdpy
