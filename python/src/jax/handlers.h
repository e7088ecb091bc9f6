// XLA's custom calls.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>

namespace xdjax {

// The entries for jax.ffi: {platform: {"types": {name: {...}}, "targets": {name: {stage:
// capsule}}}}.
nanobind::dict registrations();

// The number of times that XLA has called a handler of an operation in this process. More
// operations than that have run where XLA replays command buffers.
std::uint64_t calls();

}  // namespace xdjax
