// Device memory of the caller (cudaMalloc's, or a pool's that is made of it), lent to peers through
// legacy CUDA IPC. Unlike the library's own memory it goes away with its owner: if that process
// ends or frees it, peers that use it fault.
#pragma once

#include "memory/segment.h"

namespace xd {

// [ptr, ptr + bytes) on `device`, as a segment. The descriptor is none. Throws INVALID_ARGUMENT if
// it is not one allocation's memory on that device, UNSUPPORTED if it cannot be lent.
SegmentMaker::Made lend_cuda_memory(int device, void* ptr, std::size_t bytes);

// What rank `owner` has lent, accessible from `device`. Throws UNSUPPORTED, MISMATCH.
std::shared_ptr<Segment> borrow_cuda_memory(int device, int owner,
                                            std::span<const std::byte> description);

}  // namespace xd
