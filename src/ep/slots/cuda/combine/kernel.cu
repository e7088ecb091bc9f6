// xd_ll_combine whose partial sums travel in the payload type.
#include "ep/slots/cuda/combine/kernel.cuh"

namespace xd::ep::cuda {
namespace {

using CombineKernel = void (*)(LlCombineParams);

template <LlWay kWay>
CombineKernel kernel_for(DType type) {
  return type == DType::bf16  ? low_latency::combine_kernel<LlSame<Bf16>, kWay>
         : type == DType::f16 ? low_latency::combine_kernel<LlSame<F16>, kWay>
                              : low_latency::combine_kernel<LlSame<F32>, kWay>;
}

}  // namespace

void launch(const LlCombineParams& params, const LaunchShape& shape, cudaStream_t stream) {
  if (params.form != LlForm::same) return launch_wire(params, shape, stream);
  LlCombineParams given = params;
  given.route.dependent = params.group.dependent;
  const auto type = static_cast<DType>(params.type);
  const CombineKernel kernel = params.route.quick           ? kernel_for<LlWay::quick>(type)
                               : params.group.num_hosts > 1 ? kernel_for<LlWay::by_host>(type)
                                                            : kernel_for<LlWay::any>(type);
  launch_dependent(kernel, given, shape, params.group.dependent, stream);
}

void load_ll_combine(const LaunchShape& shape, bool wires) {
  if (wires) load_ll_wire(shape);
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    load_dependent(kernel_for<LlWay::quick>(type), shape, 0);
    load_dependent(kernel_for<LlWay::any>(type), shape, 0);
    load_dependent(kernel_for<LlWay::by_host>(type), shape, 0);
  }
}

}  // namespace xd::ep::cuda
