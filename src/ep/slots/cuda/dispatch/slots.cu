// Dispatch into slots.
#include "ep/slots/cuda/dispatch/kernel.cuh"

namespace xd::ep::cuda {
namespace {

bool has_slots(const LlDevice& group) { return group.terms.layout == ll_layout(XD_LL_SLOTS); }

}  // namespace

void launch(const LlDispatchParams& params, const LaunchShape& shape, cudaStream_t stream) {
  if (!has_slots(params.group)) return launch_rows(params, shape, stream);
  launch_dispatch<false>(params, shape, stream);
}

void load_ll_dispatch(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes) {
  if (!has_slots(group)) return load_ll_rows(group, shape, shared_bytes);
  load_dispatch<false>(group, shape, shared_bytes);
}

}  // namespace xd::ep::cuda
