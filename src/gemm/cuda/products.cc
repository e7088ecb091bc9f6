#include "gemm/cuda/products.h"

#include <algorithm>
#include <utility>

#include "base/error.h"

namespace xd::gemm::cuda {
namespace {

using xd::cuda::Product;
using xd::cuda::ProductPointers;
using xd::cuda::ProductShape;
using xd::cuda::lt::Algorithm;

// Whether what was measured of `tuned` says something about `other`, of any number of rows: the
// same operands and columns, and a sum that is at most twice as long, or half as long.
bool is_like(const ProductShape& tuned, const ProductShape& other) {
  return tuned.n == other.n && tuned.k <= 2 * other.k && other.k <= 2 * tuned.k &&
         tuned.a_type == other.a_type && tuned.b_type == other.b_type &&
         tuned.transpose_a == other.transpose_a && tuned.transpose_b == other.transpose_b &&
         tuned.stores_at_peers == other.stores_at_peers && tuned.compute == other.compute &&
         tuned.has_block_scales() == other.has_block_scales();
}

ProductShape packed(ProductShape shape) {
  shape.a_pitch = shape.transpose_a ? shape.m : shape.k;
  shape.b_pitch = shape.transpose_b ? shape.k : shape.n;
  shape.d_pitch = shape.n;
  return shape;
}

// A shape of the sizes of another.
ProductShape sized_as(ProductShape shape, const ProductShape& other) {
  shape.m = other.m;
  shape.n = other.n;
  shape.k = other.k;
  shape.stores_at_peers = other.stores_at_peers;
  return packed(shape);
}

// A shape's facts beside its sizes.
ProductShape types_of(ProductShape shape) {
  shape.m = shape.n = shape.k = 0;
  shape.stores_at_peers = false;
  return packed(shape);
}

}  // namespace

ProductShape class_of(ProductShape shape) {
  shape.m = row_class(shape.m);
  return packed(shape);
}

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
  warming_ = true;
  const auto describe_rows = [&](std::int64_t rows) {
    shape.m = rows;
    try {
      find(packed(shape));
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    }
  };
  std::int64_t last = 0;
  for (std::int64_t rows = 16; last < most_rows; rows = row_class(rows + 1)) {
    describe_rows(rows);
    last = rows;
  }
  for (std::int64_t rows = 1; rows <= std::min(most_rows, KernelLoader::kFewRows); ++rows) {
    describe_rows(rows);
  }
  loader_.synchronize();
  warming_ = false;
}

void Products::load_all(const std::vector<ProductShape>& shapes) {
  const std::lock_guard lock(mutex_);
  loader_.load_all(library_, shapes);
}

// A product of few rows may be of any number of them.
void Products::load_tuned(const std::vector<ProductShape>& shapes) {
  const std::lock_guard lock(mutex_);
  for (const TunedProduct& tuned : tuned_) {
    const bool few = tuned.shape.m <= KernelLoader::kFewRows;
    for (const ProductShape& each : shapes) {
      ProductShape shape = sized_as(each, tuned.shape);
      if (!is_like(tuned.shape, shape)) continue;
      for (shape.m = few ? 1 : shape.m; shape.m <= tuned.shape.m; ++shape.m) {
        static_cast<void>(loader_.load(library_, packed(shape), tuned.algorithm));
      }
    }
  }
  loader_.synchronize();
}

void Products::take(std::vector<TunedProduct> tuned) {
  const std::lock_guard lock(mutex_);
  tuned_ = std::move(tuned);
}

// A sum of another length takes a time in proportion, beside what every product takes.
ProductTimes Products::times_of(const ProductShape& shape) const {
  const double fixed = Machine{}.product_us;
  ProductTimes times;
  for (const TunedProduct& tuned : tuned_) {
    if (!is_like(tuned.shape, shape) || times.count == static_cast<int>(times.of.size())) continue;
    const double scale = static_cast<double>(shape.k) / static_cast<double>(tuned.shape.k);
    times.of[static_cast<std::size_t>(times.count++)] = {
        tuned.shape.m, fixed + std::max(tuned.us - fixed, 0.0) * scale};
  }
  return times;
}

void Products::run(const ProductShape& shape, const ProductPointers& pointers, float alpha,
                   float beta, cudaStream_t stream) {
  if (shape.m == 0 || shape.n == 0) return;
  const std::lock_guard lock(mutex_);
  Product& product = find(shape);
  const auto run_chosen = [&] { product.run(pointers, alpha, beta, workspace_.data(), stream); };
  try {
    return run_chosen();
  } catch (const Error& error) {
    if (error.status() != XD_ERROR_UNSUPPORTED) throw;
  }
  // Some algorithms mind the alignment of pointers, and say so only now, when peers may wait: those
  // that have been launched come first.
  const Algorithm refused = product.chosen();
  std::vector<Algorithm> others = loader_.all_of(shape);
  others.insert(others.end(), product.candidates().begin(), product.candidates().end());
  for (const Algorithm& other : others) {
    if (other == refused || !product.choose(other)) continue;
    try {
      return run_chosen();
    } catch (const Error& error) {
      if (error.status() != XD_ERROR_UNSUPPORTED) throw;
    }
  }
  product.choose(refused);
  run_chosen();
}

Product& Products::find(const ProductShape& shape) {
  ++uses_;
  if (const auto found = products_.find(shape); found != products_.end()) {
    found->second.used = uses_;
    return found->second.product;
  }
  Product made(library_, shape, kWorkspaceBytes);
  choose(made);
  if (products_.size() >= kMostDescribed) forget_oldest();
  return products_.emplace(shape, Described{std::move(made), uses_}).first->second.product;
}

void Products::forget_oldest() {
  products_.erase(std::ranges::min_element(
      products_, {}, [](const auto& described) { return described.second.used; }));
}

// While kernels may be loaded: the algorithm of the class; else what was measured; else the best
// that can be launched; else the best. In a call only one that has been launched, if there is one:
// that of the class, what was measured, the best, that of another number of rows, or any.
void Products::choose(Product& product) {
  const ProductShape its_class = class_of(product.shape());
  const auto chosen = of_class_.find(its_class);
  if (chosen != of_class_.end() && choose_loaded(product, chosen->second)) return;
  const auto any_of = [&](auto&& choose_one) {
    return std::ranges::any_of(product.candidates(), choose_one);
  };
  const bool found =
      choose_tuned(product) ||
      any_of([&](const Algorithm& candidate) { return choose_loaded(product, candidate); }) ||
      (!warming_ && (choose_neighbours(product) || choose_any(product))) ||
      any_of([&](const Algorithm& candidate) {
        return product.choose(candidate) && loader_.load(library_, product.shape(), candidate);
      }) ||
      product.choose(product.candidates().front());
  if (found) of_class_.emplace(its_class, product.chosen());
}

// Chooses an algorithm that has been launched, or is while kernels may be loaded; false if either
// cannot be.
bool Products::choose_loaded(Product& product, const Algorithm& algorithm) {
  if (!warming_ && !loader_.has(product.shape(), algorithm)) return false;
  return product.choose(algorithm) && loader_.load(library_, product.shape(), algorithm);
}

// The algorithm of the products of the same types that have the most similar number of rows, among
// those that have been launched.
bool Products::choose_neighbours(Product& product) const {
  const ProductShape& shape = product.shape();
  std::map<double, const Algorithm*> by_distance;
  for (const auto& [other, algorithm] : of_class_) {
    if (types_of(other) != types_of(shape) || !loader_.has(shape, algorithm)) continue;
    const double ratio = static_cast<double>(other.m) / static_cast<double>(shape.m);
    by_distance.emplace(std::max(ratio, 1 / ratio), &algorithm);
  }
  return std::ranges::any_of(by_distance,
                             [&](const auto& each) { return product.choose(*each.second); });
}

bool Products::choose_any(Product& product) const {
  return std::ranges::any_of(loader_.all_of(product.shape()),
                             [&](const Algorithm& algorithm) { return product.choose(algorithm); });
}

bool Products::choose_tuned(Product& product) {
  const std::int64_t rows = row_class(product.shape().m);
  const auto found = std::ranges::find_if(tuned_, [&](const TunedProduct& tuned) {
    return tuned.shape.m == rows && is_like(tuned.shape, product.shape());
  });
  return found != tuned_.end() && choose_loaded(product, found->algorithm);
}

}  // namespace xd::gemm::cuda
