// A device's part in the communicator of a rank that computes on it. A communicator on the CPU has
// none: it only uses host memory.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>

#include "comm/device/comm.h"
#include "comm/fatal.h"
#include "memory/segment.h"

namespace xd {

// The words that the host of a rank shares with the rank's kernels. Thread-safe, and never waits
// for kernels.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;

  virtual const DeviceComm& device_comm() const = 0;

  // Makes segments of memory at `ptr` that the caller of the library owns and lends to the ranks.
  virtual std::unique_ptr<SegmentMaker> lender(void* ptr) const = 0;

  // ---- From the host to kernels ----
  virtual void set_finished() = 0;
  // The rank takes part in nothing any more; `left`: it has said goodbye. Called by one thread at a
  // time.
  virtual void set_lost(int rank, bool left) = 0;
  // Tells kernels where that segment of every rank lies from now on; null = that rank has none.
  virtual void set_heap(std::uint32_t segment,
                        std::span<const std::shared_ptr<Segment>> of_rank) = 0;

  // ---- From kernels to the host ----
  // The fatal error that a kernel has met, or nullptr.
  virtual const FatalError* raised() const = 0;
};

}  // namespace xd
