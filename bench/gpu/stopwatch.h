// Measures how long an operation takes on a GPU, by events on its stream.
#pragma once

#include "../stopwatch.h"
#include "device.h"
#include "kernels.h"

namespace bench::gpu {

class GpuStopwatch : public Stopwatch {
 public:
  // Collective, before any other allocation in the communicator's heap: see SharedMemory.
  GpuStopwatch(xd_comm* comm, const Stream& stream, int rank, int ranks);
  ~GpuStopwatch() override;

  static constexpr std::size_t kHeapBytes = kMaxRanks * sizeof(std::uint32_t);  // of the heap

 private:
  double measure_once(const std::function<void()>& lead,
                      const std::function<void()>& enqueue) override;

  const Stream& stream_;
  const SharedMemory slots_;
  const PinnedWords words_;
  Gate gate_{};
  cudaEvent_t start_ = nullptr, end_ = nullptr;
};

}  // namespace bench::gpu
