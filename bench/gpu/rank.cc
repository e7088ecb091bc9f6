#include "rank.h"

namespace bench::gpu {
namespace {

std::size_t cache_bytes(int device) {
  int bytes = 0;
  ok(cudaDeviceGetAttribute(&bytes, cudaDevAttrL2CacheSize, device), "size of the L2 cache");
  return static_cast<std::size_t>(bytes);
}

}  // namespace

void Board::copy(void* to, const void* from, std::size_t bytes) const {
  ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "copy of results");
  stream_.wait("copy of results");
}

std::vector<double> Board::slowest(const std::vector<double>& mine) const {
  const std::size_t bytes = mine.size() * sizeof(double);
  copy(memory_.of(rank_), mine.data(), bytes);
  bench::ok(xd_comm_barrier(comm_));
  std::vector<double> result, other(mine.size());
  if (rank_ == 0) {
    result = mine;
    for (int rank = 1; rank < ranks_; ++rank) {
      copy(other.data(), memory_.of(rank), bytes);
      for (std::size_t i = 0; i < other.size(); ++i) result[i] = std::max(result[i], other[i]);
    }
  }
  bench::ok(xd_comm_barrier(comm_));  // rank 0 has read the boards
  return result;
}

void Board::broadcast(std::span<std::byte> bytes) const {
  if (rank_ == 0) copy(memory_.of(0), bytes.data(), bytes.size());
  bench::ok(xd_comm_barrier(comm_));
  if (rank_ != 0) copy(bytes.data(), memory_.of(0), bytes.size());
  bench::ok(xd_comm_barrier(comm_));
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
