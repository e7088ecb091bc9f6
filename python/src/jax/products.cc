#include "products.h"

#include <algorithm>
#include <array>
#include <cstddef>

namespace xdjax {
namespace {

// The first rows of a buffer, which are the tokens of a rank.
class Tokens {
 public:
  Tokens(const DLTensor* buffer, const Products::Numbers& numbers, const Operands& operands)
      : whole_(buffer) {
    if (buffer == nullptr || numbers.tokens.empty()) return;
    rows_ = *buffer;
    std::copy_n(buffer->shape, buffer->ndim, shape_.begin());
    shape_[0] = numbers.tokens[static_cast<std::size_t>(operands.rank())];
    rows_.shape = shape_.data();
    whole_ = &rows_;
  }
  Tokens(const Tokens&) = delete;
  Tokens& operator=(const Tokens&) = delete;

  [[nodiscard]] const DLTensor* get() const { return whole_; }

 private:
  const DLTensor* whole_;
  DLTensor rows_{};
  std::array<std::int64_t, Operands::max_dims> shape_{};
};

const std::int64_t* tokens_per_rank(const Products::Numbers& numbers) {
  return numbers.tokens.empty() ? nullptr : numbers.tokens.data();
}

xd_gemm_args args_of(const Products::Numbers& numbers, const Operands& operands) {
  auto args = args_of<xd_gemm_args>(operands);
  args.transpose_a = numbers.transpose_a ? 1 : 0;
  args.transpose_b = numbers.transpose_b ? 1 : 0;
  args.epilogue = numbers.epilogue;
  args.allow_tf32 = numbers.allow_tf32 ? 1 : 0;
  args.algo = numbers.algo;
  args.tag = numbers.tag;
  return args;
}

xd_status all_gather(const Products::Numbers& numbers, xd_gemm_args args, xd_gemm_context* context,
                     const Operands& operands, xd_stream stream) {
  const Tokens a(args.a, numbers, operands);
  // One scale of b is one of a; one for each column of b, or for 128, is one for each row of a, or
  // several.
  const bool of_rows =
      args.b_scale != nullptr && (args.b_scale->ndim > 1 || args.b_scale->shape[0] > 1);
  const Tokens a_scale(of_rows ? args.a_scale : nullptr, numbers, operands);
  args.a = a.get();
  if (of_rows) args.a_scale = a_scale.get();
  args.tokens_per_rank = tokens_per_rank(numbers);
  return xd_gemm_all_gather(context, &args, stream);
}

xd_status reduce_scatter(const Products::Numbers& numbers, xd_gemm_args args,
                         xd_gemm_context* context, const Operands& operands, xd_stream stream) {
  const Tokens d(args.d, numbers, operands);
  const Tokens pre_activation(args.pre_activation, numbers, operands);
  args.d = d.get();
  args.pre_activation = pre_activation.get();
  args.tokens_per_rank = tokens_per_rank(numbers);
  return xd_gemm_reduce_scatter(context, &args, stream);
}

xd_status bulk(const Products::Numbers& numbers, const xd_gemm_args& product,
               xd_gemm_context* context, const Operands& operands, xd_stream stream) {
  const bool gathers = numbers.collective == XD_GEMM_ALL_GATHER;
  const Tokens own(operands.find(gathers ? "in" : "out"), numbers, operands);
  xd_gemm_bulk_args args XD_GEMM_BULK_ARGS_INIT;
  args.product = &product;
  args.collective = numbers.collective;
  args.tag = product.tag;
  args.in = gathers ? own.get() : operands.find("in");
  args.out = gathers ? operands.find("out") : own.get();
  args.tokens_per_rank = tokens_per_rank(numbers);
  return xd_gemm_bulk(context, &args, stream);
}

}  // namespace

xd_status Products::run(Operation operation, const Numbers& numbers, Handle* context,
                        const Operands& operands, xd_stream stream) {
  const xd_gemm_args args = args_of(numbers, operands);
  switch (operation) {
    case XD_GEMM_ALL_GATHER:
      return all_gather(numbers, args, context, operands, stream);
    case XD_GEMM_REDUCE_SCATTER:
      return reduce_scatter(numbers, args, context, operands, stream);
    case XD_GEMM_ALL_REDUCE:
      return xd_gemm_all_reduce(context, &args, stream);
    case XD_GEMM_BULK:
      return bulk(numbers, args, context, operands, stream);
    case XD_GEMM_START_ALL_GATHER:
      break;
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
