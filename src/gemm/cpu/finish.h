// The steps that make D of a sum before it is rounded.
#pragma once

#include <cstdint>
#include <span>

#include "gemm/calls.h"
#include "gemm/cpu/memory.h"

namespace xd::gemm::cpu {

// Whether the sum, times alpha, is D as it is.
bool is_plain(const ProductCall& call);

class Finish {
 public:
  explicit Finish(const Scratch& scratch) : scratch_(scratch) {}

  // `call` stays where it is until end(). Clears column sums, if any are wanted.
  void begin(const ProductCall& call, std::span<float> column_sums);

  // Numbers [column, column + columns) of a row of d, after alpha: adds beta * C and bias, applies
  // the activation and stores. Changes `x`. `column_sums`: n sums to which D is added.
  void row(float* x, std::int64_t row, std::int64_t column, std::int64_t columns,
           float* column_sums);

  // Stores the largest magnitude, if it is wanted.
  void end();

 private:
  void activate(float* x, std::int64_t row, std::int64_t column, std::size_t columns);

  const Scratch& scratch_;
  const ProductCall* call_ = nullptr;
  std::uint32_t largest_ = 0;
};

}  // namespace xd::gemm::cpu
