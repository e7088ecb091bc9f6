#include "gemm/cuda/products.h"

#include <algorithm>

#include "cuda/stream.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::Product;
using xd::cuda::ProductPointers;
using xd::cuda::ProductShape;

// Pitches of a class' shape are those of packed rows, so that padded ones belong to it as well.
ProductShape class_of(ProductShape shape) {
  shape.m = row_class(shape.m);
  shape.a_pitch = shape.transpose_a ? shape.m : shape.k;
  shape.b_pitch = shape.transpose_b ? shape.k : shape.n;
  shape.d_pitch = shape.n;
  return shape;
}

}  // namespace

std::int64_t row_class(std::int64_t rows) {
  std::int64_t size = 16;
  while (size < rows) {
    if (size / 2 * 3 >= rows) return size / 2 * 3;
    size *= 2;
  }
  return size;
}

Products::Products(int device)
    : device_(device), workspace_(device, kWorkspaceBytes, "working memory of products") {}

void Products::warm_up(ProductShape shape, std::int64_t most_rows, std::byte* a, std::byte* b,
                       std::byte* d) {
  const xd::cuda::Stream stream(device_);
  for (std::int64_t rows = 16; rows < 2 * most_rows; rows = row_class(rows + 1)) {
    shape.m = std::min(rows, most_rows);
    shape.a_pitch = shape.transpose_a ? shape.m : shape.k;
    for (const float beta : {0.0f, 1.0f}) {
      run(shape, {.a = a, .b = b, .d = d}, 1.0f, beta, stream.get());
    }
  }
  stream.synchronize();
}

void Products::run(const ProductShape& shape, const ProductPointers& pointers, float alpha,
                   float beta, cudaStream_t stream) {
  if (shape.m == 0 || shape.n == 0) return;
  find(shape).run(pointers, alpha, beta, workspace_.data(), stream);
}

Product& Products::find(const ProductShape& shape) {
  if (const auto found = products_.find(shape); found != products_.end()) return found->second;
  Product made(library_, shape, kWorkspaceBytes);
  const ProductShape its_class = class_of(shape);
  if (const auto chosen = of_class_.find(its_class); chosen != of_class_.end()) {
    made.choose(chosen->second);  // else it keeps the first that cuBLASLt suggests
  } else {
    of_class_.emplace(its_class, made.chosen());
  }
  return products_.emplace(shape, std::move(made)).first->second;
}

}  // namespace xd::gemm::cuda
