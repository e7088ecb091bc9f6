// The products that a context has described, by shape, and the algorithm for each. The latest ones
// are kept, many more than an operation has.
//
// Numbers of rows change from call to call, so algorithms are kept by class of rows: a shape takes
// the algorithm of its class where it can. Every kernel of a product has been launched before
// (KernelLoader), and warm_up() sees to that beforehand for all classes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/memory.h"
#include "gemm/cost_model.h"
#include "gemm/cuda/kernel_loader.h"
#include "gemm/cuda/tuning.h"

namespace xd::gemm::cuda {

// Rows of products of one class: up to the next 2^k or 3 * 2^k.
std::int64_t row_class(std::int64_t rows);
// The shape of all products of a class. Pitches are those of packed rows, so that padded ones
// belong to it as well.
xd::cuda::ProductShape class_of(xd::cuda::ProductShape shape);

class Products {
 public:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

  // Called with the device current.
  explicit Products(int device);

  // Takes algorithms that have been measured, before warm_up().
  void take(std::vector<TunedProduct> tuned);
  // The times of products like `shape` by their rows, as far as these have been measured.
  ProductTimes times_of(const xd::cuda::ProductShape& shape) const;
  std::byte* workspace() const { return workspace_.data(); }

  // Chooses algorithms for every class up to `most_rows`, loads their kernels, and returns when
  // that has ended. `shape` has columns, types and the order of elements. Nothing where cuBLASLt
  // has no such product.
  void warm_up(xd::cuda::ProductShape shape, std::int64_t most_rows);

  // Sees to it that products of these types, of any size, find an algorithm whose kernels have been
  // loaded.
  void load_all(const std::vector<xd::cuda::ProductShape>& shapes);

  // Loads the kernels of what was measured also for those of these types that it stands for.
  void load_tuned(const std::vector<xd::cuda::ProductShape>& shapes);

  // Throws UNSUPPORTED if cuBLASLt has no such product.
  void describe(const xd::cuda::ProductShape& shape) {
    const std::lock_guard lock(mutex_);
    if (shape.m > 0 && shape.n > 0) find(shape);
  }
  // Enqueues a product; none where it has no elements.
  void run(const xd::cuda::ProductShape& shape, const xd::cuda::ProductPointers& pointers,
           float alpha, float beta, cudaStream_t stream);

 private:
  struct Described {
    xd::cuda::Product product;
    std::uint64_t used;  // number of the use, of all products' uses
  };
  static constexpr std::size_t kMostDescribed = 1024;

  xd::cuda::Product& find(const xd::cuda::ProductShape& shape);
  void forget_oldest();
  void choose(xd::cuda::Product& product);
  bool choose_loaded(xd::cuda::Product& product, const xd::cuda::lt::Algorithm& algorithm);
  bool choose_neighbours(xd::cuda::Product& product) const;
  bool choose_any(xd::cuda::Product& product) const;
  bool choose_tuned(xd::cuda::Product& product);

  std::mutex mutex_;  // explain() may be called beside an operation
  xd::cuda::ProductLibrary library_;
  xd::cuda::DeviceBuffer workspace_;
  KernelLoader loader_;
  std::map<xd::cuda::ProductShape, Described> products_;
  std::uint64_t uses_ = 0;
  bool warming_ = false;  // kernels may be loaded now
  std::vector<TunedProduct> tuned_;
  // The algorithm of a class: its shape has the class' number of rows.
  std::map<xd::cuda::ProductShape, xd::cuda::lt::Algorithm> of_class_;
};

}  // namespace xd::gemm::cuda
