// The order of work on CUDA streams.
#pragma once

#include <cstdint>

namespace xdpy {

// Work that stream `second` gets from now on begins when all that `first` has got has ended. Both
// are of that device, and either may be part of a capture; stream 0 is that of the current context
// if this is one of the device, else the primary's. Any thread. Throws std::runtime_error.
void order_streams(int device, std::uintptr_t first, std::uintptr_t second);

}  // namespace xdpy
