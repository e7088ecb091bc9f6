#include "rank.h"

namespace bench::gpu {
namespace {

std::size_t cache_bytes(int device) {
  int bytes = 0;
  ok(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "size of the L2 cache");
  return static_cast<std::size_t>(bytes);
}

}  // namespace

std::vector<double> RankResults::slowest(const std::vector<double>& mine) const {
  return bench::slowest(comm_, rank_, ranks_, mine);
}

void RankResults::broadcast(std::span<std::byte> bytes) const {
  std::vector<std::byte> all(static_cast<std::size_t>(ranks_) * bytes.size());
  bench::ok(xd_comm_all_gather(comm_, bytes.data(), all.data(), bytes.size()));
  std::copy_n(all.begin(), bytes.size(), bytes.begin());
}

int copies_against_cache(const Workload& w, std::size_t bytes, int device) {
  const std::size_t wanted = 2 * cache_bytes(device) / std::max<std::size_t>(bytes, 1) + 1;
  return static_cast<int>(std::min(wanted, static_cast<std::size_t>(w.warmup + w.iters)));
}

void flush_cache(const Stream& stream, int device) {
  const Memory scratch(nullptr, stream, 3 * cache_bytes(device));  // zeroed, through the cache
  stream.wait("flushing the cache");
}

}  // namespace bench::gpu
