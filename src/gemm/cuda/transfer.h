// Gathers and sums of a tensor beside a product of this rank alone, and gathers beside whatever
// comes next. Copy engines move the rows on the context's own stream:
//
//   gather   c                       s                 sum   c                      s
//            open ◄───────────────── (caller's work)         open ◄──────────────── (caller's work)
//            copy, flag to each peer product                 copy to each peer      product
//            landed: all sources     ..                      │                      ..
//            copy into `out`                                 └────────────────────► sum, ends
//            close ────────────────► (joined)
#pragma once

#include "gemm/calls.h"
#include "gemm/cuda/operations.h"

namespace xd::gemm::cuda {

class Transfer {
 public:
  Transfer(const Workshop& workshop, const TransferCall& call, const EnqueuedTurn& turn,
           cudaStream_t stream)
      : w_(workshop), call_(call), turn_(turn), s_(stream) {}

  // Describes the product, if there is one, as Operation does.
  void describe_product() const;
  void enqueue() const;
  // Enqueues a gather, and what ends it on the context's stream, which nothing waits for.
  void begin() const;

 private:
  void gather() const;
  void sum() const;
  void product() const;
  void copy_rows(std::byte* to, const std::byte* from, std::int64_t rows) const;

  int rank() const { return w_.group.rank(); }
  int ranks() const { return w_.group.ranks(); }
  cudaStream_t c() const { return w_.side->get(); }
  std::uint64_t row_bytes() const { return call_.in.row_bytes(); }

  const Workshop& w_;
  const TransferCall& call_;
  const EnqueuedTurn& turn_;
  const cudaStream_t s_;
};

}  // namespace xd::gemm::cuda
