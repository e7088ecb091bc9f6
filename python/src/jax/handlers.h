// XLA's custom calls.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace xdjax {

// For jax.ffi: {platform: {"types": {name: {...}}, "targets": {name: {stage: capsule}}}}.
nanobind::dict registrations();

// How often XLA has called a handler of an operation in this process. Less often than operations
// have run where it replays command buffers.
std::uint64_t calls();

}  // namespace xdjax
