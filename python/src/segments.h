// Gives memory that the caller owns to torch's caching allocator as segments.
//
// torch takes the two functions whose addresses `segment_functions` gives as the allocator of a
// memory pool. It calls them on any thread, without the GIL, and never waits for them. They give
// the segment that the calling thread has been offered just before, and nothing else.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

namespace xdpy {

// Addresses of `void* take(ssize_t, int, void*)` and `void give_back(void*, ssize_t, int, void*)`.
std::pair<std::uintptr_t, std::uintptr_t> segment_functions();

// The next segment of at most `bytes` bytes that this thread takes begins at `address`; 0 = none.
void offer_segment(std::uintptr_t address, std::size_t bytes);

// True if the segment has been taken and not given back.
bool segment_taken(std::uintptr_t address);

}  // namespace xdpy
