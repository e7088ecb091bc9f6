#include "stopwatch.h"

#include <atomic>
#include <stdexcept>

#include "../ranks.h"

namespace bench::gpu {
namespace {

enum Word { kEnqueued, kFailed };

}  // namespace

GpuStopwatch::GpuStopwatch(xd_comm* comm, const Stream& stream, int rank, int ranks)
    : stream_(stream), slots_(comm, stream, kHeapBytes), words_(pinned_words(rank)) {
  bench::ok(xd_comm_barrier(comm));
  if (ranks > kMaxRanks) throw std::runtime_error("too many ranks for the common start");
  words_.host[kEnqueued] = 0;
  words_.host[kFailed] = 0;
  for (int r = 0; r < ranks; ++r) {
    gate_.slots[r] = reinterpret_cast<std::uint32_t*>(slots_.of(r));
  }
  gate_.host = words_.device + kEnqueued;
  gate_.failed = words_.device + kFailed;
  gate_.rank = rank;
  gate_.ranks = ranks;
  ok(cudaEventCreate(&start_), "cudaEventCreate");
  ok(cudaEventCreate(&end_), "cudaEventCreate");
}

GpuStopwatch::~GpuStopwatch() {
  cudaEventDestroy(start_);
  cudaEventDestroy(end_);
}

double GpuStopwatch::measure_once(const std::function<void()>& lead,
                                  const std::function<void()>& enqueue) {
  ++gate_.round;
  launch_gate(gate_, stream_);
  try {
    if (lead) lead();
    ok(cudaEventRecord(start_, stream_), "start");
    enqueue();
    ok(cudaEventRecord(end_, stream_), "end");
  } catch (...) {
    words_.host[kEnqueued] = gate_.round;  // the gate must not wait for operations that never come
    throw;
  }
  std::atomic_thread_fence(std::memory_order_release);
  words_.host[kEnqueued] = gate_.round;
  ok(cudaEventSynchronize(end_), "waiting for the operation");
  if (words_.host[kFailed] != 0) {
    throw std::runtime_error("some rank did not come to the common start within 20 s");
  }
  float milliseconds = 0;
  ok(cudaEventElapsedTime(&milliseconds, start_, end_), "cudaEventElapsedTime");
  return static_cast<double>(milliseconds) * 1e-3;
}

}  // namespace bench::gpu
