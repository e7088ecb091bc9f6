// Describes memory that a Python object owns as a tensor for any array library.
#pragma once

#include <nanobind/nanobind.h>

#include <cstdint>
#include <vector>

namespace xdpy {

namespace nb = nanobind;

// A capsule "dltensor" over [address, ...) that keeps `owner` alive until its consumer, or an
// unused capsule, lets go, on any thread. Then it calls released(owner), unless that is None.
nb::object as_dlpack(std::uintptr_t address, std::vector<std::int64_t> shape, int dtype,
                     int device_type, int device_id, nb::object owner, nb::object released);

}  // namespace xdpy
