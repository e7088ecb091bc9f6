// Any operation of a context of products, whole, on small exact data.
#pragma once

#include <memory>

#include "conformance/gemm/batch.h"

namespace xd::test {

inline constexpr xd_gemm_operation kGemmOperations[] = {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER,
                                                        XD_GEMM_ALL_REDUCE, XD_GEMM_BULK,
                                                        XD_GEMM_START_ALL_GATHER};

// `token_units` of plain_gemm_case: how large the operations are.
xd_gemm_config gemm_fault_config(int num_ranks, std::int64_t token_units = 4);

class GemmCall {
 public:
  GemmCall(const Rank& rank, xd_gemm_operation operation, std::int64_t token_units = 4);

  // START_ALL_GATHER is begun and waited for.
  GemmOutcome call(xd_gemm_context* context);
  void check(xd_gemm_context* context);

 private:
  Rank rank_;
  xd_gemm_operation operation_;
  std::unique_ptr<GemmBatch> product_;
  std::unique_ptr<Tensor> in_, out_;  // of what bulk and start_all_gather gather
};

}  // namespace xd::test
