// A product of one rank by cuBLASLt, without the library: what an overlapped one is compared with.
#pragma once

#include <memory>
#include <vector>

#include "../gemm/data.h"
#include "cuda/cublaslt.h"
#include "device.h"

namespace bench::gpu {

class ProductFloor {
 public:
  // D [M,N] = A [M,K] * B [N,K], all of them packed.
  struct Operands {
    const void *a, *b;
    void* d;
  };
  ProductFloor(const GemmProblem& problem, const Operands& operands, const Stream& stream);

  // The algorithms that cuBLASLt suggests. Each has run once when this object has been made.
  int candidates() const { return static_cast<int>(products_.size()); }
  void choose(int candidate) { chosen_ = static_cast<std::size_t>(candidate); }
  void enqueue() const;

 private:
  static constexpr std::size_t kWorkspaceBytes = std::size_t{32} << 20;
  static constexpr std::size_t kMostCandidates = 8;

  const Operands operands_;
  const Stream& stream_;
  const xd::cuda::ProductLibrary library_;
  const Memory workspace_;
  std::vector<std::unique_ptr<xd::cuda::Product>> products_;  // one for each candidate
  std::size_t chosen_ = 0;
};

}  // namespace bench::gpu
