#include "gemm/cuda/kernel_loader.h"

#include <algorithm>
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

// Products that have been launched in this process: device, a kind of products, algorithm.
struct Launched {
  std::mutex mutex;
  std::set<std::tuple<int, ProductShape, Algorithm>> all;
  std::set<int> complete;  // devices on which products of all kinds have been
};
Launched& launched() {
  static Launched it;
  return it;
}

ProductShape resized(ProductShape shape, std::int64_t m, std::int64_t n, std::int64_t k) {
  shape.m = m;
  shape.n = n;
  shape.k = k;
  shape.a_pitch = shape.transpose_a ? m : k;
  shape.b_pitch = shape.transpose_b ? k : n;
  shape.d_pitch = n;
  shape.stores_at_peers = false;
  return shape;
}

// Products that an algorithm computes by one kernel: of any size, but that an algorithm may have
// other kernels for each small number of rows.
ProductShape kind_of(const ProductShape& shape) {
  return resized(shape, shape.m <= KernelLoader::kFewRows ? shape.m : 0, 0, 0);
}

// A small product of the same kind.
ProductShape small_product(const ProductShape& shape) {
  return resized(shape, std::min(shape.m, kSize), std::min(shape.n, kSize),
                 std::min(shape.k, kSize));
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

// Products that it has launched have ended before their operands are given to another stream.
KernelLoader::~KernelLoader() {
  xd::cuda::try_on_device(device_, [this] { stream_.synchronize(); });
}

bool KernelLoader::has(const ProductShape& shape, const Algorithm& algorithm) const {
  const std::lock_guard lock(launched().mutex);
  return launched().all.contains({device_, kind_of(shape), algorithm});
}

std::vector<Algorithm> KernelLoader::all_of(const ProductShape& shape) const {
  const ProductShape kind = kind_of(shape);
  std::vector<Algorithm> found;
  const std::lock_guard lock(launched().mutex);
  for (auto at = launched().all.lower_bound({device_, kind, Algorithm{}});
       at != launched().all.end() && std::get<0>(*at) == device_ && std::get<1>(*at) == kind;
       ++at) {
    found.push_back(std::get<2>(*at));
  }
  return found;
}

void KernelLoader::load_all(const ProductLibrary& library,
                            const std::vector<ProductShape>& shapes) {
  {
    const std::lock_guard lock(launched().mutex);
    if (launched().complete.contains(device_)) return;
  }
  for (const ProductShape& shape : shapes) load_any(library, shape);
  synchronize();
  const std::lock_guard lock(launched().mutex);
  launched().complete.insert(device_);
}

void KernelLoader::load_any(const ProductLibrary& library, const ProductShape& shape) {
  for (std::int64_t rows = 1; rows <= kFewRows + 1; ++rows) {
    const ProductShape one = resized(shape, rows <= kFewRows ? rows : kSize, kSize, kSize);
    if (!all_of(one).empty()) continue;
    try {
      const Product product(library, one, kWorkspaceBytes);
      static_cast<void>(std::ranges::any_of(product.candidates(), [&](const Algorithm& candidate) {
        return load(library, one, candidate);
      }));
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    }
  }
}

bool KernelLoader::load(const ProductLibrary& library, const ProductShape& shape,
                        const Algorithm& algorithm) {
  if (has(shape, algorithm)) return true;
  if (!launch(library, small_product(shape), algorithm)) return false;
  note(device_, shape, algorithm);
  return true;
}

void KernelLoader::note(int device, const ProductShape& shape, const Algorithm& algorithm) {
  const std::lock_guard lock(launched().mutex);  // not held while a launch may wait
  launched().all.insert({device, kind_of(shape), algorithm});
}

// Inputs and output are the same zeros, and stay so.
bool KernelLoader::launch(const ProductLibrary& library, const ProductShape& shape,
                          const Algorithm& algorithm) {
  try {
    Product product(library, shape, kWorkspaceBytes);
    if (!product.choose(algorithm)) return false;
    std::byte* const at = operands_.data();
    const auto* const scale = operands_.as<const float>();
    for (const float beta : {0.0f, 1.0f}) {
      // These never add C, and need not be able to.
      if (beta != 0 && shape.has_block_scales()) continue;
      product.run({.a = at, .b = at, .d = at, .bias = at, .a_scale = scale, .b_scale = scale}, 1.0f,
                  beta, workspace_.data(), stream_.get());
    }
    return true;
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    return false;
  }
}

}  // namespace xd::gemm::cuda
