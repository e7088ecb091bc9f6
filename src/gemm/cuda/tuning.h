// Which of cuBLASLt's algorithms is fastest for the products of a context, by timing them when it
// is made, on all ranks at once.
//
// The first suggestion of cuBLASLt is up to a seventh slower than the best one, most for few rows
// and where a product stores into other devices' memory. One rank's findings are taken by all, so
// that they choose alike: algorithms for products, and from their times ways for calls.
#pragma once

#include <cstddef>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "gemm/config.h"
#include "gemm/cost_model.h"

namespace xd::gemm::cuda {

struct TunedProduct {
  xd::cuda::ProductShape shape;  // of a class of rows: class_of()
  xd::cuda::lt::Algorithm algorithm;
  double us;
};

// Where products may store while they are timed.
struct TuningMemory {
  std::byte* scratch = nullptr;
  std::uint64_t scratch_bytes = 0;
  std::byte* workspace = nullptr;
  std::byte* stitched = nullptr;  // nullptr = there are no such cells
  std::uint64_t cell_bytes = 0;
};

class Tuner {
 public:
  // Called with the device current.
  Tuner(int device, const Config& config, const TuningMemory& memory);
  ~Tuner();
  Tuner(const Tuner&) = delete;
  Tuner& operator=(const Tuner&) = delete;

  // Empty where the device has no memory for operands. Products whose time does not matter, or
  // takes too long to measure, are left out.
  std::vector<TunedProduct> measure();

 private:
  void fill_operands(std::uint64_t a_bytes, std::uint64_t b_bytes);
  void measure_order(xd::cuda::ProductShape shape, std::vector<TunedProduct>& found);
  void measure_one(const xd::cuda::ProductShape& shape, std::byte* d,
                   std::vector<TunedProduct>& found);
  // Microseconds of each candidate.
  std::vector<double> time(xd::cuda::Product& product, std::size_t candidates, std::byte* d);
  bool is_worth_it(const xd::cuda::ProductShape& shape) const;

  const int device_;
  const Config& config_;
  const TuningMemory memory_;
  const xd::cuda::ProductLibrary library_;
  xd::cuda::Stream stream_;
  xd::cuda::DeviceBuffer operands_;
  std::byte* b_ = nullptr;
};

}  // namespace xd::gemm::cuda
