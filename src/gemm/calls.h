// The operations' arguments after their checks. These are all checks that need no tensor's content,
// so every executor shares them. Each read_* throws INVALID_ARGUMENT, or UNSUPPORTED where the
// context was not made for the call.
#pragma once

#include <crossdock/gemm.h>

#include <cstdint>
#include <optional>
#include <span>

#include "base/math.h"
#include "base/tensor.h"
#include "gemm/config.h"
#include "gemm/family.h"

namespace xd::gemm {

// The rows of each rank in a tensor of all ranks.
class Shares {
 public:
  Shares() = default;
  // `starts`: the first row of each rank, and the number of all.
  explicit Shares(std::span<const std::int64_t> starts) : starts_(starts) {}

  std::int64_t start(int rank) const { return starts_[at(rank)]; }
  std::int64_t rows(int rank) const { return starts_[at(rank) + 1] - starts_[at(rank)]; }
  std::int64_t all() const { return starts_.back(); }
  std::uint64_t fingerprint() const;

 private:
  std::span<const std::int64_t> starts_;
};

struct CallContext {
  const Config* config;
  DLDevice device;
  int rank;
  std::span<std::int64_t> starts;  // num_ranks + 1 numbers, which the call's Shares refer to
  bool shape_only = false;         // elements are not looked at
};

// One of the three operations, or the product of bulk.
struct ProductCall {
  xd_gemm_operation operation;
  Tensor a{}, b{}, d{}, c{}, bias{}, pre_activation{}, bias_grad{};
  Tensor a_scale{}, b_scale{}, d_scale{}, d_amax{}, gathered{}, gathered_scale{};
  bool transpose_a = false, transpose_b = true;
  bool reduce_bias_grad = false, fast_accumulate = false, allow_tf32 = false;
  float alpha = 1.0f, beta = 0.0f;
  xd_gemm_epilogue epilogue = XD_GEMM_EPILOGUE_NONE;
  Scaling scaling = Scaling::none;
  xd_gemm_algo algo = XD_GEMM_ALGO_AUTO;  // as the call or else the context says
  std::uint32_t tag = 0;
  // Rows of tokens of a, inner dimension, columns of d.
  std::int64_t a_rows = 0, k = 0, n = 0;
  Shares shares{};  // not of all_reduce and bulk

  bool has_activation_input() const {
    return epilogue == XD_GEMM_EPILOGUE_DGELU || epilogue == XD_GEMM_EPILOGUE_DRELU;
  }
  bool writes_pre_activation() const { return pre_activation && !has_activation_input(); }
  // The type of c, and of the products that are summed over ranks.
  DType wide_type() const { return dtype_bytes(d.type) == 1 ? DType::bf16 : d.type; }
};
ProductCall read_product(xd_gemm_operation operation, const xd_gemm_args* args,
                         const CallContext& context);

struct TransferCall {
  xd_gemm_operation operation;
  bool reduces = false;
  std::uint32_t tag = 0;
  Tensor in{}, out{};
  Shares shares{};
  std::optional<ProductCall> product{};  // of bulk, where there is one
};
TransferCall read_bulk(const xd_gemm_bulk_args* args, const CallContext& context);
TransferCall read_gather(const xd_gemm_gather_args* args, const CallContext& context);

// The record by which a rank tells its peers of a call. The executor adds places.
Record record_of(const ProductCall& call, xd_gemm_algo algo);
Record record_of(const TransferCall& call);

}  // namespace xd::gemm
