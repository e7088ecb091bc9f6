// The order of work on CUDA streams.
#pragma once

#include <cstdint>

namespace xdpy {

// Work that stream `second` gets from now on begins when all that `first` has got has ended. Both
// are of that device, and either may be part of a capture. Any thread. Throws std::runtime_error.
void order_streams(int device, std::uintptr_t first, std::uintptr_t second);

}  // namespace xdpy
