#include "gemm/cuda/products.h"

#include <algorithm>

#include "base/error.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::Product;
using xd::cuda::ProductPointers;
using xd::cuda::ProductShape;
using xd::cuda::lt::Algorithm;

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
    : workspace_(device, kWorkspaceBytes, "working memory of products"), loader_(device) {}

void Products::warm_up(ProductShape shape, std::int64_t most_rows) {
  const std::lock_guard lock(mutex_);
  try {
    for (std::int64_t rows = 16; rows < 2 * most_rows; rows = row_class(rows + 1)) {
      shape.m = std::min(rows, most_rows);
      find(class_of(shape));
    }
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
  }
  loader_.synchronize();
}

void Products::run(const ProductShape& shape, const ProductPointers& pointers, float alpha,
                   float beta, cudaStream_t stream) {
  if (shape.m == 0 || shape.n == 0) return;
  const std::lock_guard lock(mutex_);
  find(shape).run(pointers, alpha, beta, workspace_.data(), stream);
}

Product& Products::find(const ProductShape& shape) {
  if (const auto found = products_.find(shape); found != products_.end()) return found->second;
  Product made(library_, shape, kWorkspaceBytes);
  choose(made);
  loader_.load(library_, shape, made.chosen());
  return products_.emplace(shape, std::move(made)).first->second;
}

// The algorithm of the class; else the best that has been launched; else the best.
void Products::choose(Product& product) {
  const ProductShape its_class = class_of(product.shape());
  const auto chosen = of_class_.find(its_class);
  if (chosen != of_class_.end() && product.choose(chosen->second)) return;
  for (const Algorithm& candidate : product.candidates()) {
    if (loader_.has(product.shape(), candidate) && product.choose(candidate)) break;
  }
  of_class_.emplace(its_class, product.chosen());
}

}  // namespace xd::gemm::cuda
