// Contexts and functions of products as TransformerEngine has them, and numbers to multiply.
#pragma once

#include <crossdock/compat/te_comm_gemm.h>

#include <array>
#include <cstdint>
#include <memory>
#include <vector>

#include "compat/te/tensors.h"
#include "support/world.h"

namespace xd::test {

struct DestroyTeContext {
  void operator()(NVTECommGemmCtx* ctx) const { nvte_comm_gemm_ctx_destroy(ctx); }
};
using TeContext = std::unique_ptr<NVTECommGemmCtx, DestroyTeContext>;

// Collective.
inline TeContext make_te_context(const Rank& rank, ncclComm_t comm) {
  return TeContext(nvte_comm_gemm_ctx_create(comm, rank.num_ranks, rank.rank));
}

inline auto te_function(xd_gemm_operation operation) {
  return operation == XD_GEMM_ALL_GATHER       ? nvte_all_gather_gemm
         : operation == XD_GEMM_REDUCE_SCATTER ? nvte_gemm_reduce_scatter
                                               : nvte_gemm_all_reduce;
}

// The product of sizes m, n and k with `a` transposed and nothing beside its operands. Returns when
// it has ended.
inline void multiply(const Rank& rank, NVTECommGemmCtx* ctx, xd_gemm_operation operation,
                     const std::array<std::int64_t, 3>& mnk, Tensor& a, Tensor& b, Tensor& d) {
  te_function(operation)(ctx, mnk[0], mnk[1], mnk[2], te_tensor(a.dl()).data(),
                         te_tensor(b.dl()).data(), te_tensor(d.dl()).data(), nullptr, nullptr, true,
                         false, false, false, 0, rank.stream(), kNVTECommGemmAlgoDefault);
  rank.memory->synchronize();
}

// Rows of `columns` equal numbers: row i has (first + i) * factor.
inline std::vector<float> equal_columns(std::int64_t first, std::int64_t rows, std::int64_t columns,
                                        std::int64_t factor) {
  std::vector<float> values;
  for (std::int64_t i = first; i < first + rows; ++i) {
    values.insert(values.end(), static_cast<std::size_t>(columns), static_cast<float>(i * factor));
  }
  return values;
}

}  // namespace xd::test
