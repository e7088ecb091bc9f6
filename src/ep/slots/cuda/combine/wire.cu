// xd_ll_combine under a wire other than SAME. Codes have a kernel for usual launches, as the
// payload type has; all else has one kernel, which also sums by host.
#include "ep/slots/cuda/combine/kernel.cuh"

namespace xd::ep::cuda {
namespace {

using CombineKernel = void (*)(LlCombineParams);

template <template <class> class Form, LlWay kWay>
CombineKernel kernel_for(DType type) {
  return type == DType::bf16  ? low_latency::combine_kernel<Form<Bf16>, kWay>
         : type == DType::f16 ? low_latency::combine_kernel<Form<F16>, kWay>
                              : low_latency::combine_kernel<Form<F32>, kWay>;
}

}  // namespace

void launch_wire(const LlCombineParams& params, const LaunchShape& shape, cudaStream_t stream) {
  LlCombineParams given = params;
  given.route.dependent = params.group.dependent;
  const auto type = static_cast<DType>(params.type);
  const CombineKernel kernel = params.form == LlForm::floats
                                   ? kernel_for<LlFloats, LlWay::any>(type)
                               : params.route.quick ? kernel_for<LlCodes, LlWay::quick>(type)
                                                    : kernel_for<LlCodes, LlWay::any>(type);
  launch_dependent(kernel, given, shape, params.group.dependent, stream);
}

void load_ll_wire(const LaunchShape& shape) {
  for (const DType type : {DType::bf16, DType::f16, DType::f32}) {
    load_dependent(kernel_for<LlCodes, LlWay::quick>(type), shape, 0);
    load_dependent(kernel_for<LlCodes, LlWay::any>(type), shape, 0);
    load_dependent(kernel_for<LlFloats, LlWay::any>(type), shape, 0);
  }
}

}  // namespace xd::ep::cuda
