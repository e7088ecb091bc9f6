// The local experts: two matrix products and an activation on each expert's zone of rows.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "layer.h"

namespace demo {

struct ExpertWeights {
  std::span<float> w1, w2;  // [L,H,F], [L,F,H]
};

class Experts {
 public:
  // `rows`: the receive tensor's.
  Experts(const Sizes& sizes, std::size_t rows);

  // Expert e works on rows offsets[e] .. offsets[e + 1] - 1 of `in` and writes those of `out`; both
  // are [R,H]. Keeps what backward needs.
  void forward(const ExpertWeights& weights, std::span<const std::int32_t> offsets,
               std::span<const float> in, std::span<float> out);

  struct Gradients {
    std::span<const float> out;  // in  [R,H]
    std::span<float> in;         // out [R,H]
    ExpertWeights weights;       // out
  };
  // For the same offsets and `in` as the last forward.
  void backward(const ExpertWeights& weights, std::span<const std::int32_t> offsets,
                std::span<const float> in, const Gradients& gradients);

 private:
  Sizes sizes_;
  std::vector<float> inner_, activated_, grad_inner_;  // [R,F]
};

}  // namespace demo
