#include "products.h"

namespace xdjax {
namespace {

xd_gemm_args args_of(const Products::Numbers& numbers, const Operands& operands) {
  xd_gemm_args args XD_GEMM_ARGS_INIT;
  args.a = operands.find("a");
  args.b = operands.find("b");
  args.d = operands.find("d");
  args.transpose_a = numbers.transpose_a ? 1 : 0;
  args.transpose_b = numbers.transpose_b ? 1 : 0;
  args.bias = operands.find("bias");
  args.a_scale = operands.find("a_scale");
  args.b_scale = operands.find("b_scale");
  args.epilogue = numbers.epilogue;
  args.pre_activation = operands.find("pre_activation");
  args.gathered = operands.find("gathered");
  args.allow_tf32 = numbers.allow_tf32 ? 1 : 0;
  args.algo = numbers.algo;
  args.tag = numbers.tag;
  return args;
}

xd_status bulk(const xd_gemm_args& product, xd_gemm_operation collective, xd_gemm_context* context,
               const Operands& operands, xd_stream stream) {
  xd_gemm_bulk_args args XD_GEMM_BULK_ARGS_INIT;
  args.product = &product;
  args.collective = collective;
  args.tag = product.tag;
  args.in = operands.find("in");
  args.out = operands.find("out");
  return xd_gemm_bulk(context, &args, stream);
}

}  // namespace

xd_status Products::run(Operation operation, const Numbers& numbers, Handle* context,
                        const Operands& operands, xd_stream stream) {
  const xd_gemm_args args = args_of(numbers, operands);
  switch (operation) {
    case XD_GEMM_ALL_GATHER:
      return xd_gemm_all_gather(context, &args, stream);
    case XD_GEMM_REDUCE_SCATTER:
      return xd_gemm_reduce_scatter(context, &args, stream);
    case XD_GEMM_ALL_REDUCE:
      return xd_gemm_all_reduce(context, &args, stream);
    case XD_GEMM_BULK:
      return bulk(args, numbers.collective, context, operands, stream);
    case XD_GEMM_START_ALL_GATHER:
      break;
  }
  return XD_ERROR_INTERNAL;
}

}  // namespace xdjax
