// XLA's custom calls.
#pragma once

#include <nanobind/nanobind.h>

namespace xdjax {

// For jax.ffi: {platform: {"types": {name: {...}}, "targets": {name: {stage: capsule}}}}.
nanobind::dict registrations();

}  // namespace xdjax
