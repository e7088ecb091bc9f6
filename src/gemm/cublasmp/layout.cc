#include "gemm/cublasmp/layout.h"

#include <algorithm>

#include "base/error.h"
#include "gemm/cublasmp/library.h"

namespace xd::gemm::cublasmp {
namespace {

// cuBLASMp's number of an algorithm is ours less that of its default.
static_assert(XD_GEMM_ALGO_CUBLASMP_FUSED - XD_GEMM_ALGO_CUBLASMP == mp::kFused);

constexpr int kFirstWithFused = 1000;  // 0.10.0

std::int64_t part(std::int64_t size, int ranks) { return (size + ranks - 1) / ranks; }

// True if the tokens are dealt out as cuBLASMp does: in parts of ceil(M / W).
bool are_blocks(const Shares& shares, int ranks) {
  for (int r = 0; r < ranks; ++r) {
    if (shares.rows(r) != local_size(shares.all(), r, ranks)) return false;
  }
  return true;
}

// Seen with cuBLASMp 0.10.0: reduce_scatter by ATOMIC_P2P gives the terms of all ranks the scales
// of the rank where they are added. Other algorithms scale each rank's term by its own.
bool scales_sums(const ProductCall& call, int ranks) {
  const bool atomic = call.algo == XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P ||
                      call.algo == XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST;
  return atomic && call.operation != XD_GEMM_ALL_GATHER && ranks > 1 &&
         (call.a_scale || call.b_scale);
}

std::string algorithm_obstacle(const ProductCall& call, const Abilities& abilities) {
  const bool sums = call.operation != XD_GEMM_ALL_GATHER;
  const bool multicast = call.algo == XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST ||
                         call.algo == XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST ||
                         call.algo == XD_GEMM_ALGO_CUBLASMP_FUSED;
  if (multicast && !sums) return "exists for sums over ranks only";
  if (call.algo == XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST &&
      call.operation != XD_GEMM_REDUCE_SCATTER) {
    return "exists for reduce_scatter only";
  }
  if (call.algo == XD_GEMM_ALGO_CUBLASMP_FUSED) {
    if (call.operation != XD_GEMM_ALL_REDUCE) return "exists for all_reduce only";
    if (abilities.version < kFirstWithFused) {
      return concat("needs cuBLASMp ", version_text(kFirstWithFused), " or later, found ",
                    version_text(abilities.version));
    }
  }
  if (multicast && !abilities.multicast) {
    return "needs NVLink multicast, which NCCL does not have for these devices (NCCL_NVLS_ENABLE "
           "= 0 also turns it off)";
  }
  return "";
}

}  // namespace

std::string obstacle(const ProductCall& call, const Config& config, const Abilities& abilities) {
  if (std::string found = algorithm_obstacle(call, abilities); !found.empty()) return found;
  const bool gathers = call.operation == XD_GEMM_ALL_GATHER;
  if (call.operation == XD_GEMM_ALL_REDUCE && (call.transpose_a || !call.transpose_b)) {
    return "needs transpose_a = 0 and transpose_b = 1 in all_reduce";
  }
  if (call.operation != XD_GEMM_ALL_REDUCE && !are_blocks(call.shares, config.ranks)) {
    return "needs ceil(M / W) tokens on each rank, fewer on the last ones alone";
  }
  if (call.gathered || call.gathered_scale || (gathers && config.keep_gathered)) {
    return "does not give the gathered rows (gathered, gathered_scale, keep_gathered)";
  }
  if (call.scaling == Scaling::rows || call.scaling == Scaling::blocks) {
    return "needs scales of one number each";
  }
  for (const Tensor* scale : {&call.a_scale, &call.b_scale}) {
    if (reinterpret_cast<std::uintptr_t>(scale->data) % 16 == 0) continue;
    return concat("needs scales that begin at multiples of 16 bytes, as ", scale->name,
                  " does not");
  }
  if (gathers && call.a_scale && config.ranks > 1) {
    return "multiplies the rows of all ranks by one a_scale, and each rank has its own";
  }
  if (scales_sums(call, config.ranks)) {
    return "multiplies a sum by the scales of the rank that keeps it, and each rank has its own";
  }
  return "";
}

Description describe(const ProductCall& call, const Config& config, DType d_type, bool finished) {
  const int ranks = config.ranks;
  const bool gathers = call.operation == XD_GEMM_ALL_GATHER;
  const bool reduces_all = call.operation == XD_GEMM_ALL_REDUCE;
  const std::int64_t m = gathers ? call.n * ranks : call.n;
  const std::int64_t n = reduces_all ? call.a_rows : call.shares.all();
  const std::int64_t k = gathers ? call.k : call.k * ranks;
  const std::int64_t m_part = gathers ? call.n : m;
  const std::int64_t n_part = reduces_all ? n : part(n, ranks);
  Description made{
      .m = m,
      .n = n,
      .k = k,
      .transpose_first = call.transpose_b,
      .transpose_second = call.transpose_a,
      .algorithm = call.algo - XD_GEMM_ALGO_CUBLASMP,
      .compute = call.a.type == DType::f32 && call.allow_tf32 ? mp::kComputeTf32 : mp::kCompute32F,
      .sums = !gathers};
  // In columns, b is [k,m] where it is transposed, else [m,k]; a is [k,n], or [n,k] if transposed.
  // all_gather spreads m and n, so that a part is one of columns where k is in the rows.
  made.first = call.transpose_b ? Spread{k, m, call.k, m_part, call.k, call.b.type, gathers}
                                : Spread{m, k, m_part, call.k, call.n, call.b.type, !gathers};
  made.second =
      call.transpose_a
          ? Spread{n,           k,       n_part, call.k, std::max<std::int64_t>(call.a_rows, 1),
                   call.a.type, !gathers}
          : Spread{k, n, call.k, n_part, call.k, call.a.type, gathers};
  made.d = {m, reduces_all ? n * ranks : n, m_part, n_part, call.n, d_type, !gathers};
  if (reduces_all) made.epilogue |= mp::kEpilogueAllReduce;
  if (finished && call.bias) made.epilogue |= mp::kEpilogueBias;
  if (finished && call.epilogue == XD_GEMM_EPILOGUE_RELU) made.epilogue |= mp::kEpilogueRelu;
  return made;
}

Operands operands_of(const ProductCall& call, void* d, bool finished) {
  alignas(256) static std::byte somewhere[256];
  const auto address = [](const Tensor& tensor) {
    return tensor.data != nullptr ? tensor.data : somewhere;
  };
  const auto scale = [&](const Tensor& tensor) {
    return tensor ? reinterpret_cast<const float*>(address(tensor)) : nullptr;
  };
  const bool adds = finished && call.c;
  return {.first = address(call.b),
          .second = address(call.a),
          .c = adds ? address(call.c) : nullptr,
          .d = d != nullptr ? d : somewhere,
          .bias = address(call.bias),
          .bias_type = call.bias.type,
          .first_scale = scale(call.b_scale),
          .second_scale = scale(call.a_scale),
          .alpha = call.alpha,
          .beta = adds ? call.beta : 0.0f};
}

}  // namespace xd::gemm::cublasmp
