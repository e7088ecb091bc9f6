#include "gemm/cuda/kernel_loader.h"

#include <mutex>
#include <set>
#include <tuple>

#include "base/error.h"
#include "cuda/error.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::Product;
using xd::cuda::ProductLibrary;
using xd::cuda::ProductShape;
using xd::cuda::lt::Algorithm;

constexpr std::int64_t kSize = 512;
static_assert(kSize * kSize * sizeof(float) == KernelLoader::kOperandBytes);

// What has been launched in this process: device, a shape without sizes, algorithm.
struct Launched {
  std::mutex mutex;
  std::set<std::tuple<int, ProductShape, Algorithm>> all;
};
Launched& launched() {
  static Launched it;
  return it;
}

ProductShape resized(ProductShape shape, std::int64_t size) {
  shape.m = shape.n = shape.k = size;
  shape.a_pitch = shape.b_pitch = shape.d_pitch = size;
  shape.far = false;
  return shape;
}

}  // namespace

KernelLoader::KernelLoader(int device)
    : device_(device),
      stream_(device),
      operands_(device, kOperandBytes, "operands of first products"),
      workspace_(device, kWorkspaceBytes, "working memory of first products") {
  XD_CUDA_CHECK(cudaMemsetAsync(operands_.data(), 0, kOperandBytes, stream_.get()));
  stream_.synchronize();
}

bool KernelLoader::has(const ProductShape& shape, const Algorithm& algorithm) const {
  const std::lock_guard lock(launched().mutex);
  return launched().all.contains({device_, resized(shape, 0), algorithm});
}

void KernelLoader::load(const ProductLibrary& library, const ProductShape& shape,
                        const Algorithm& algorithm) {
  if (has(shape, algorithm)) return;
  launch(library, resized(shape, kSize), algorithm);
  note(device_, shape, algorithm);
}

void KernelLoader::note(int device, const ProductShape& shape, const Algorithm& algorithm) {
  const std::lock_guard lock(launched().mutex);  // not held while a launch may wait
  launched().all.insert({device, resized(shape, 0), algorithm});
}

// Inputs and output are the same zeros, and stay so.
void KernelLoader::launch(const ProductLibrary& library, const ProductShape& shape,
                          const Algorithm& algorithm) {
  try {
    Product product(library, shape, kWorkspaceBytes);
    if (!product.choose(algorithm)) return;
    std::byte* const at = operands_.data();
    const auto* const scale = operands_.as<const float>();
    for (const float beta : {0.0f, 1.0f}) {
      product.run({.a = at, .b = at, .d = at, .bias = at, .a_scale = scale, .b_scale = scale}, 1.0f,
                  beta, workspace_.data(), stream_.get());
    }
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
  }
}

}  // namespace xd::gemm::cuda
