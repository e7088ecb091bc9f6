// A context's bounds, validated, with every default filled in.
#pragma once

#include <crossdock/gemm.h>

#include <algorithm>
#include <cstdint>

#include "base/dtype.h"

namespace xd::gemm {

// Elements along K that share a scale, and columns of B that do.
inline constexpr std::int64_t kScaleBlock = 128;

constexpr std::int64_t scale_blocks(std::int64_t elements) {
  return (elements + kScaleBlock - 1) / kScaleBlock;
}

// The algorithms that cuBLASMp carries out.
constexpr bool is_cublasmp(xd_gemm_algo algo) {
  return algo >= XD_GEMM_ALGO_CUBLASMP && algo <= XD_GEMM_ALGO_CUBLASMP_FUSED;
}

// Reads a number of xd_gemm_algo. Throws INVALID_ARGUMENT that names `field`.
xd_gemm_algo read_algo(const char* field, int algo);

struct Config {
  int ranks = 0;
  int operations = 0;  // as a sum of XD_GEMM_BIT
  std::int64_t max_tokens = 0;
  std::int64_t max_k = 0;
  std::int64_t max_n = 0;
  DType type = DType::bf16;
  xd_gemm_algo algo = XD_GEMM_ALGO_AUTO;
  int num_comm_sms = 0;
  bool keep_gathered = false;
  bool allow_fallback = false;
  int device_type = 0;        // as given
  void* nccl_comm = nullptr;  // lent for cuBLASMp

  bool has(xd_gemm_operation operation) const { return (operations & XD_GEMM_BIT(operation)) != 0; }
  // Whether calls may ask for cuBLASMp.
  bool is_for_cublasmp() const { return nccl_comm != nullptr || is_cublasmp(algo); }
  // Whether rows of ranks are gathered, and whether rows are summed over ranks.
  bool gathers() const {
    return has(XD_GEMM_ALL_GATHER) || has(XD_GEMM_BULK) || has(XD_GEMM_START_ALL_GATHER);
  }
  bool sums() const {
    return has(XD_GEMM_REDUCE_SCATTER) || has(XD_GEMM_ALL_REDUCE) || has(XD_GEMM_BULK);
  }
  // The most rows of all ranks together.
  std::int64_t all_tokens() const { return ranks * max_tokens; }
  // The largest element that is gathered, and the largest of a sum's terms: those of fp8 results
  // are bfloat16.
  std::uint64_t gathered_bytes() const { return dtype_bytes(type); }
  std::uint64_t summed_bytes() const { return std::max<std::uint64_t>(2, dtype_bytes(type)); }
};

// `comm_ranks` = 0 where there is no communicator: config.num_ranks must then be set. Throws
// INVALID_ARGUMENT naming the field, what was expected and what came.
Config read_config(const xd_gemm_config* user, int comm_ranks);

// This rank's share of `global` rows or columns.
std::int64_t local_size(std::int64_t global, int rank, int ranks);

}  // namespace xd::gemm
