// One rank of a measurement on GPUs: its place, and the parts that all its measurements share.
#pragma once

#include <cstdint>
#include <vector>

#include "../rank.h"
#include "../routing.h"
#include "../workload.h"
#include "device.h"
#include "stopwatch.h"

namespace bench::gpu {

inline constexpr int kTimeoutMs = 20000;

// Called before the first call of CUDA. `eager`: kernels are loaded with the program, and not at
// their first launch.
void set_up_environment(bool eager);

// The layout of ranks on devices.
struct Place {
  Launch launch;
  int devices;        // number of devices
  int ranks_per_gpu;  // number of ranks that share a device
  int device_of(int rank) const { return rank / ranks_per_gpu % devices; }
  bool shares_devices() const { return ranks_per_gpu > 1; }
};
// 0 = as few as possible. Throws std::runtime_error where there is no device.
Place place_ranks(const Launch& launch, int ranks_per_gpu = 0);
// Likewise; without a launch, of threads.
Place place_ranks(const DriverOptions& driver);

// The facts about the batch that every rank of this process needs; computed once.
struct Batch {
  explicit Batch(const Workload& w)
      : workload(w), routing(make_routing(w)), rows(count_rows(w, routing)) {}

  // The bytes of the batch, split equally over the peers.
  std::size_t bytes_per_peer() const;

  Workload workload;
  std::vector<Choices> routing;
  std::vector<std::vector<std::int64_t>> rows;  // [source][destination]
};

// The means of a rank, on the current device. Collective to make.
struct Means {
  // `landing_bytes`: of memory that peers may write; equal on all ranks.
  Means(const Launch& launch, int rank, const CommOptions& options, std::size_t landing_bytes = 0,
        Pool pool = Pool::closed);
  // Bytes that they take of the heap.
  static std::size_t heap_bytes(std::size_t landing_bytes = 0) {
    return GpuStopwatch::kHeapBytes + landing_bytes + (std::size_t{4} << 20);
  }

  const Comm comm;
  const Stream stream;
  // These are made first and in this order, equal on all ranks: see SharedMemory.
  GpuStopwatch watch;
  const SharedMemory landing;
  const Rank at;
};

struct RankContext : Rank {
  RankContext(const Means& means, const Batch& of)
      : Rank(means.at), stream(means.stream), batch(of), landing(means.landing) {}

  const Stream& stream;
  const Batch& batch;
  const SharedMemory& landing;

  const Workload& workload() const { return batch.workload; }
  Iterations iterations() const { return {batch.workload.warmup, batch.workload.iters}; }
};

// Counts, on the device, elements that are not as expected.
class WrongElements {
 public:
  explicit WrongElements(const Stream& stream) : stream_(stream), count_(stream, {0}) {}
  unsigned long long* counter() const { return count_.data(); }
  // Throws std::runtime_error if there are any, of `what`.
  void expect_none(const char* what) const;

 private:
  const Stream& stream_;
  const DeviceArray<unsigned long long> count_;
};

// The number of copies of `bytes` bytes with which an iteration finds none of its inputs in the L2
// cache; no more than there are iterations.
int copies_against_cache(const Workload& w, std::size_t bytes, int device);

// Overwrites the L2 cache of this device.
void flush_cache(const Stream& stream);

}  // namespace bench::gpu
