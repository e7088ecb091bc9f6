// Dispatch of groups whose rows lie without gaps, by expert or by source rank.
#include "ep/slots/cuda/dispatch/kernel.cuh"

namespace xd::ep::cuda {

void launch_rows(const LlDispatchParams& params, const LaunchShape& shape, cudaStream_t stream) {
  launch_dispatch<true>(params, shape, stream);
}

void load_ll_rows(const LlDevice& group, const LaunchShape& shape, std::size_t shared_bytes) {
  load_dispatch<true>(group, shape, shared_bytes);
}

}  // namespace xd::ep::cuda
