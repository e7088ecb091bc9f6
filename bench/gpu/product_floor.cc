#include "product_floor.h"

namespace bench::gpu {
namespace {

cudaDataType_t lt_type(Element element) {
  switch (element) {
    case Element::fp32:
      return CUDA_R_32F;
    case Element::fp16:
      return CUDA_R_16F;
    default:
      return CUDA_R_16BF;
  }
}

xd::cuda::ProductShape shape_of(const GemmProblem& p) {
  const cudaDataType_t type = lt_type(p.element);
  return {.m = p.tokens,
          .n = p.shape.n,
          .k = p.shape.k,
          .a_type = type,
          .b_type = type,
          .d_type = type,
          .bias_type = type,
          .a_pitch = p.shape.k,
          .b_pitch = p.shape.k,
          .d_pitch = p.shape.n};
}

}  // namespace

ProductFloor::ProductFloor(const GemmProblem& problem, const Operands& operands,
                           const Stream& stream)
    : operands_(operands), stream_(stream), workspace_(nullptr, stream, kWorkspaceBytes) {
  const xd::cuda::ProductShape shape = shape_of(problem);
  std::size_t count = 1;
  for (std::size_t i = 0; i < count && i < kMostCandidates; ++i) {
    auto product = std::make_unique<xd::cuda::Product>(library_, shape, kWorkspaceBytes);
    const std::vector<xd::cuda::lt::Algorithm>& candidates = product->candidates();
    count = candidates.size();
    if (product->choose(candidates[i])) products_.push_back(std::move(product));
  }
  for (chosen_ = 0; chosen_ < products_.size(); ++chosen_) enqueue();
  stream_.wait("a product");
  chosen_ = 0;
}

void ProductFloor::enqueue() const {
  products_.at(chosen_)->run({.a = operands_.a, .b = operands_.b, .d = operands_.d}, 1.0f, 0.0f,
                             workspace_.data(), stream_);
}

}  // namespace bench::gpu
