#include "rank.h"

#include <algorithm>
#include <cstdlib>
#include <stdexcept>
#include <string>

namespace bench::gpu {
namespace {

std::size_t cache_bytes(int device) {
  int bytes = 0;
  ok(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "size of the L2 cache");
  return static_cast<std::size_t>(bytes);
}

}  // namespace

// A kernel that is loaded at its first launch, or a stream that shares a hardware queue with one of
// another rank, would wait for kernels that wait for it. The collectives have no use for multicast
// objects, which NCCL would make by default.
void set_up_environment(bool eager) {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  if (eager) ::setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

Place place_ranks(const Launch& launch, int ranks_per_gpu) {
  std::string why;
  const int devices = count_devices(&why);
  if (devices == 0) throw std::runtime_error("no GPU: " + why);
  const int fewest = (launch.num_ranks + devices - 1) / devices;
  return {launch, devices, ranks_per_gpu == 0 ? fewest : ranks_per_gpu};
}

std::size_t Batch::bytes_per_peer() const {
  const std::size_t ranks = rows.size();
  std::int64_t sent = 0;
  for (std::size_t s = 0; s < ranks; ++s) {
    for (std::size_t d = 0; d < ranks; ++d) sent += s == d ? 0 : rows[s][d];
  }
  const auto pairs = ranks * (ranks - 1);
  return static_cast<std::size_t>(sent) * workload.wire_row_bytes() / pairs / 16 * 16;
}

Place place_ranks(const DriverOptions& driver) {
  Launch launch{.num_ranks = driver.ranks, .threads = true, .first_rank = 0};
  if (is_launched()) {
    launch = read_launch();
  } else if (launch.num_ranks == 0) {
    launch.num_ranks = place_ranks(launch).devices * std::max(driver.ranks_per_gpu, 1);
  }
  return place_ranks(launch, driver.ranks_per_gpu);
}

Means::Means(const Launch& launch, int rank, const CommOptions& options, std::size_t landing_bytes,
             Pool pool)
    : comm(make_comm(launch, rank, options)),
      stream(pool),
      watch(comm.get(), stream, rank, launch.num_ranks),
      landing(comm.get(), stream, std::max<std::size_t>(landing_bytes, 16)),
      at{rank, launch.num_ranks, comm.get(), stream, watch} {
  at.barrier();
}

void WrongElements::expect_none(const char* what) const {
  unsigned long long count = 0;
  stream_.copy(&count, counter(), sizeof(count));
  if (count == 0) return;
  throw std::runtime_error("WRONG RESULT: " + std::to_string(count) + " elements of " + what);
}

int copies_against_cache(const Workload& w, std::size_t bytes, int device) {
  const std::size_t wanted = 2 * cache_bytes(device) / std::max<std::size_t>(bytes, 1) + 1;
  return static_cast<int>(std::min(wanted, static_cast<std::size_t>(w.warmup + w.iters)));
}

void flush_cache(const Stream& stream) {
  const std::size_t bytes = 3 * cache_bytes(stream.dl().device_id);
  const Memory scratch(nullptr, stream, bytes);  // zeroed, through the cache
}

}  // namespace bench::gpu
