// The device that a rank computes on, as its communicator sees it. A communicator on the CPU only
// uses host memory.
#pragma once

#include <dlpack/dlpack.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "comm/device_comm.h"
#include "comm/fatal.h"
#include "memory/segment.h"

namespace xd {

// The facts that ranks tell one another about their devices.
struct DeviceIntroduction {
  std::int32_t type = kDLCPU;
  std::int32_t ordinal = 0;            // its number in its own process
  std::array<unsigned char, 16> id{};  // identity of the device, the same in every process
  std::int32_t multiprocessors = 0;
};

// The device that a config asks for: ordinal -1 of CUDA is the launcher's LOCAL_RANK. Throws
// INVALID_ARGUMENT; UNSUPPORTED if this machine or build has no such devices.
DLDevice resolve_device(DLDevice device);

// Checks that the device is there and has what the library needs. Throws UNSUPPORTED,
// INVALID_ARGUMENT.
DeviceIntroduction introduce_device(DLDevice device);

// Makes shared memory of the device.
std::unique_ptr<SegmentMaker> make_segment_maker(DLDevice device);

// The words that the host of a rank shares with the rank's kernels. Thread-safe, and never waits
// for kernels.
class DeviceSide {
 public:
  virtual ~DeviceSide() = default;

  virtual const DeviceComm& device_comm() const = 0;

  // ---- From the host to kernels ----
  virtual void set_finished() = 0;
  virtual void set_left(int rank) = 0;
  // Tells kernels where that segment of every rank lies from now on; null = that rank has none.
  virtual void set_heap(std::uint32_t segment,
                        std::span<const std::shared_ptr<Segment>> of_rank) = 0;

  // ---- From kernels to the host ----
  // The fatal error that a kernel has met, or nullptr.
  virtual const FatalError* raised() const = 0;
};

struct RankSeat {
  int rank;
  int num_ranks;
  int timeout_ms;
};

// Bytes of shared device memory that every rank gives for its error board; 0 = there is no
// DeviceSide on such a device.
std::size_t device_board_bytes(DLDevice device);

// `boards`: the error boards of all ranks, in shared memory of their devices.
std::unique_ptr<DeviceSide> make_device_side(DLDevice device, const RankSeat& seat,
                                             std::vector<std::shared_ptr<Segment>> boards);

// The same on CUDA, in builds that have it. What it shares lies in pinned and in device memory, as
// comm/device_comm.h has it.
std::unique_ptr<DeviceSide> make_cuda_side(int ordinal, const RankSeat& seat,
                                           std::vector<std::shared_ptr<Segment>> boards);

}  // namespace xd
