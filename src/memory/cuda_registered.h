// Device memory of the caller, lent to peers: cudaMalloc's, or a pool's that is made of it, through
// legacy CUDA IPC; virtual memory as a file descriptor. The former goes away with its owner, unlike
// the library's own memory: if that process ends or frees it, peers that use it fault.
#pragma once

#include "memory/segment.h"

namespace xd {

// [ptr, ptr + bytes) on `device`, as a segment. Throws INVALID_ARGUMENT if it is not one
// allocation's memory on that device, UNSUPPORTED if it cannot be lent.
SegmentMaker::Made lend_cuda_memory(int device, void* ptr, std::size_t bytes);

// What rank `owner` has lent, accessible from `device`. Throws UNSUPPORTED, MISMATCH.
std::shared_ptr<Segment> borrow_cuda_memory(int device, int owner,
                                            std::span<const std::byte> description, UniqueFd fd);

}  // namespace xd
