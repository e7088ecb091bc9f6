// A product that runs beside an operation, on the multiprocessors that the operation leaves: how
// long each takes alone, and how long both take side by side.
#pragma once

#include <functional>
#include <vector>

#include "product_floor.h"
#include "rank.h"

namespace bench::gpu {

// Each is the maximum over the ranks, of every iteration; on rank 0, empty on the others.
struct OverlapTimes {
  std::vector<double> product;                           // alone
  std::vector<double> operation_beside, product_beside;  // from their common start
};

class Overlap {
 public:
  // [W * T, H] times [H, H], bf16, about what a rank's experts would begin with, by cuBLASLt's
  // first choice for the whole device. It is on a stream of its own.
  explicit Overlap(const RankContext& context);
  ~Overlap();
  Overlap(const Overlap&) = delete;
  Overlap& operator=(const Overlap&) = delete;

  // `enqueue` enqueues the operation on the context's stream. Collective.
  OverlapTimes measure(const std::function<void(int)>& enqueue);

 private:
  void enqueue_product();
  static double seconds_between(cudaEvent_t start, cudaEvent_t end);

  const RankContext& at_;
  const Stream side_;
  const Memory a_, b_, d_;
  ProductFloor product_;
  cudaEvent_t start_ = nullptr, operation_end_ = nullptr, product_end_ = nullptr;
};

}  // namespace bench::gpu
