// The products that a context has described so far, by shape, and the algorithm for each.
//
// A kernel that is launched for the first time behind one that waits for a peer may hold the host
// up until that wait ends, and with it the peer, if it is a thread of the same process. So all is
// launched once when the context is made: for every class of numbers of rows, with the bounds'
// columns. A later shape of a class takes the algorithm of the class where it can.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>

#include "cuda/cublaslt.h"
#include "cuda/memory.h"

namespace xd::gemm::cuda {

// Rows of products of one class: up to the next 2^k or 3 * 2^k.
std::int64_t row_class(std::int64_t rows);

class Products {
 public:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;

  // Called with the device current.
  explicit Products(int device);

  // Launches products of every class up to `most_rows`, with and without C, and returns when they
  // have ended. `shape` has columns, types and the order of elements; `operands` is memory for
  // inputs and output, whose content is overwritten.
  void warm_up(xd::cuda::ProductShape shape, std::int64_t most_rows, std::byte* a, std::byte* b,
               std::byte* d);

  // Throws UNSUPPORTED if cuBLASLt has no such product.
  void describe(const xd::cuda::ProductShape& shape) {
    if (shape.m > 0 && shape.n > 0) find(shape);
  }
  // Enqueues a product; none where it has no elements.
  void run(const xd::cuda::ProductShape& shape, const xd::cuda::ProductPointers& pointers,
           float alpha, float beta, cudaStream_t stream);

 private:
  xd::cuda::Product& find(const xd::cuda::ProductShape& shape);

  const int device_;
  xd::cuda::ProductLibrary library_;
  xd::cuda::DeviceBuffer workspace_;
  std::map<xd::cuda::ProductShape, xd::cuda::Product> products_;
  // The algorithm of a class: its shape has the class' number of rows.
  std::map<xd::cuda::ProductShape, xd::cuda::lt::Algorithm> of_class_;
};

}  // namespace xd::gemm::cuda
