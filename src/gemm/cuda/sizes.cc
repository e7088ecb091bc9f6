#include "gemm/cuda/sizes.h"

#include <algorithm>

#include "base/math.h"
#include "gemm/cuda/block_scales.h"
#include "gemm/cuda/kernel_loader.h"
#include "gemm/cuda/peer_mapped_cells.h"
#include "gemm/cuda/products.h"

namespace xd::gemm::cuda {
namespace {

constexpr std::uint64_t kBulkBytes = std::uint64_t{16} << 20;

}  // namespace

std::uint64_t scratch_bytes(const Config& config) {
  const auto elements =
      checked_mul(static_cast<std::uint64_t>(config.all_tokens()),
                  static_cast<std::uint64_t>(config.max_n), "tokens of all ranks * max_n");
  // all_gather, cuBLASMp: float32 products that a library does not finish; else products to be
  // summed, and then exact results of this rank's rows.
  const bool narrow =
      !config.has(XD_GEMM_ALL_GATHER) && config.ranks > 1 && !config.is_for_cublasmp();
  const std::uint64_t bytes =
      checked_mul(elements, narrow ? config.summed_bytes() : 4, "bytes of all products");
  // Products of bulk have any size, and are finished in pieces.
  return config.has(XD_GEMM_BULK) ? std::max(bytes, kBulkBytes) : bytes;
}

ContextMap map_of(const Config& config) {
  return ContextMap::make(config, PeerMappedCells::cell_bytes(config) != 0);
}

// Exact results beside the products: words are for small ones, with elements of 2 bytes at least.
std::uint64_t exact_bytes(const Config& config) {
  if (!config.sums()) return 0;
  return std::min(scratch_bytes(config) * 2, 2 * ContextMap::kMostWordBytes);
}

std::uint64_t column_bytes(const Config& config) {
  return round_up(at(config.max_n) * sizeof(float), 16);
}

// Scales of an operand: of 1 where it has none, and copies where its own begin anywhere.
std::int64_t scales_count(const Config& config) {
  return static_cast<std::int64_t>(
      round_up(at(std::max({config.all_tokens(), config.max_n, config.max_k})), 4));
}
std::uint64_t scales_bytes(const Config& config) {
  return at(scales_count(config)) * sizeof(float);
}

// No bound says how long a product is that is summed over ranks; max_n is that of many.
std::uint64_t block_scale_bytes(const Config& config) {
  return BlockScaleMap::make(config.all_tokens(), config.max_n,
                             std::max(config.max_k, config.max_n))
      .end;
}

xd_gemm_memory context_memory(const Config& config) {
  xd_gemm_memory memory = XD_GEMM_MEMORY_INIT;
  memory.symmetric_bytes = round_up(map_of(config).end, PeerMappedCells::kUnit) +
                           at(config.ranks) * PeerMappedCells::cell_bytes(config);
  memory.private_bytes = scratch_bytes(config) + exact_bytes(config) + column_bytes(config) +
                         3 * scales_bytes(config) + block_scale_bytes(config) +
                         Products::kWorkspaceBytes + KernelLoader::kBytes + sizeof(Control) +
                         sizeof(Report) + at(config.ranks) * sizeof(HeapRange);
  return memory;
}

}  // namespace xd::gemm::cuda
