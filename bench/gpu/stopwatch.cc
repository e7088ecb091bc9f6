#include "stopwatch.h"

#include <atomic>
#include <stdexcept>

namespace bench::gpu {
namespace {

enum Word { kEnqueued, kFailed };

}  // namespace

Stopwatch::Stopwatch(const SharedMemory& slots, int rank, int ranks, const Stream& stream)
    : stream_(stream), words_(pinned_words(rank)) {
  if (ranks > kMaxRanks) throw std::runtime_error("too many ranks for the common start");
  words_.host[kEnqueued] = 0;
  words_.host[kFailed] = 0;
  for (int r = 0; r < ranks; ++r) {
    gate_.slots[r] = reinterpret_cast<std::uint32_t*>(slots.of(r));
  }
  gate_.host = words_.device + kEnqueued;
  gate_.failed = words_.device + kFailed;
  gate_.rank = rank;
  gate_.ranks = ranks;
  ok(cudaEventCreate(&start_), "cudaEventCreate");
  ok(cudaEventCreate(&end_), "cudaEventCreate");
}

Stopwatch::~Stopwatch() {
  cudaEventDestroy(start_);
  cudaEventDestroy(end_);
}

double Stopwatch::measure_once(const std::function<void()>& enqueue) {
  ++gate_.round;
  launch_gate(gate_, stream_);
  try {
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

std::vector<double> Stopwatch::measure(Iterations iterations,
                                       const std::function<void(int)>& enqueue) {
  const auto nothing = [] {};
  return measure_between(iterations, nothing, enqueue, nothing);
}

std::vector<double> Stopwatch::measure_between(Iterations iterations,
                                               const std::function<void()>& before,
                                               const std::function<void(int)>& enqueue,
                                               const std::function<void()>& after) {
  std::vector<double> seconds;
  for (int i = 0; i < iterations.all(); ++i) {
    before();
    const double one = measure_once([&] { enqueue(i); });
    after();
    if (i >= iterations.warmup) seconds.push_back(one);
  }
  return seconds;
}

}  // namespace bench::gpu
