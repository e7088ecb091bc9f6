// Device memory of the caller, lent to peers. Memory of cudaMalloc, or of a pool that is made of
// it, goes through legacy CUDA IPC; virtual memory goes as a file descriptor. Memory lent through
// IPC goes away with its owner, unlike the library's own memory: if that process ends or frees it,
// peers that use it fault.
#pragma once

#include "memory/segment.h"

namespace xd {

// Makes a segment of [ptr, ptr + bytes) on `device`. Throws INVALID_ARGUMENT if it is not one
// allocation's memory on that device, UNSUPPORTED if it cannot be lent.
SegmentMaker::Made lend_cuda_memory(int device, void* ptr, std::size_t bytes);

// Maps memory that rank `owner` has lent, and makes it accessible from `device`. Throws
// UNSUPPORTED, MISMATCH.
std::shared_ptr<Segment> borrow_cuda_memory(int device, int owner,
                                            std::span<const std::byte> description, UniqueFd fd);

}  // namespace xd
