// Device memory that ranks share: CUDA virtual memory, handed to peers as a file descriptor.
//
// As on the host, an allocation is mapped once per process. A process-wide table finds it by the
// identity that its creator has given it, hands out the same mapping to all ranks of the process,
// and makes that accessible from the device of each rank. An allocation has no name, and the
// physical memory lives as long as some process maps it, so the end of its creator takes nothing
// away from peers.
#pragma once

#include "memory/segment.h"

namespace xd {

class CudaSegmentMaker final : public SegmentMaker {
 public:
  explicit CudaSegmentMaker(int device) : device_(device) {}

  // Rounds the size up to units of 2 MiB.
  Made create(std::size_t bytes, const char* what) const override;
  // Also throws UNSUPPORTED, naming both devices, if this rank's device cannot use the owner's
  // memory.
  std::shared_ptr<Segment> open(int owner, std::span<const std::byte> description,
                                UniqueFd fd) const override;

 private:
  int device_;
};

}  // namespace xd
