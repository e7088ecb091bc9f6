// Device memory of the caller, lent to peers. Memory of cudaMalloc, or of a pool that is made of
// it, goes through legacy CUDA IPC; virtual memory goes as a file descriptor. Memory lent through
// IPC goes away with its owner, unlike the library's own memory: if that process ends or frees it,
// peers that use it fault.
#pragma once

#include "memory/segment.h"

namespace xd {

class CudaLender final : public SegmentMaker {
 public:
  CudaLender(int device, void* ptr) : device_(device), ptr_(ptr) {}

  // Makes a segment of [ptr, ptr + bytes), which is there already. Throws INVALID_ARGUMENT if it is
  // not one allocation's memory on the device, UNSUPPORTED if it cannot be lent.
  Made create(std::size_t bytes, const char* what) const override;
  // Maps memory that rank `owner` has lent, and makes it accessible from this rank's device. Throws
  // UNSUPPORTED, MISMATCH.
  std::shared_ptr<Segment> open(int owner, std::span<const std::byte> description,
                                UniqueFd fd) const override;

 private:
  int device_;
  void* ptr_;
};

}  // namespace xd
