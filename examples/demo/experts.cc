#include "experts.h"

#include <dnnl.h>

#include <algorithm>
#include <stdexcept>

namespace demo {
namespace {

// A row-major matrix as oneDNN takes it; `transposed` reads it the other way round.
struct Operand {
  const float* data;
  int columns;
  bool transposed = false;
};

// c [m,n] = a [m,k] * b [k,n].
void multiply(int m, int n, int k, Operand a, Operand b, float* c) {
  const auto letter = [](const Operand& operand) { return operand.transposed ? 'T' : 'N'; };
  const dnnl_status_t status = dnnl_sgemm(letter(a), letter(b), m, n, k, 1.0f, a.data, a.columns,
                                          b.data, b.columns, 0.0f, c, n);
  if (status != dnnl_success) throw std::runtime_error("dnnl_sgemm failed");
}

// Where expert e's part of each tensor is.
struct Zone {
  int rows;
  std::size_t row_h, row_f;  // first element of its rows in [R,H] and in [R,F]
  std::size_t weights;       // of its weights in w1 and in w2
};

Zone zone_of(const Sizes& sizes, std::span<const std::int32_t> offsets, std::size_t e) {
  const auto first = static_cast<std::size_t>(offsets[e]);
  return {.rows = offsets[e + 1] - offsets[e],
          .row_h = first * static_cast<std::size_t>(sizes.hidden),
          .row_f = first * static_cast<std::size_t>(sizes.inner),
          .weights = e * sizes.expert_weights()};
}

}  // namespace

Experts::Experts(const Sizes& sizes, std::size_t rows)
    : sizes_(sizes),
      inner_(rows * static_cast<std::size_t>(sizes.inner)),
      activated_(inner_.size()),
      grad_inner_(inner_.size()) {}

void Experts::forward(const ExpertWeights& weights, std::span<const std::int32_t> offsets,
                      std::span<const float> in, std::span<float> out) {
  const int h = sizes_.hidden, f = sizes_.inner;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const Zone zone = zone_of(sizes_, offsets, e);
    if (zone.rows == 0) continue;
    float* const inner = &inner_[zone.row_f];
    float* const activated = &activated_[zone.row_f];
    multiply(zone.rows, f, h, {&in[zone.row_h], h}, {&weights.w1[zone.weights], f}, inner);
    std::transform(inner, inner + static_cast<std::ptrdiff_t>(zone.rows) * f, activated, silu);
    multiply(zone.rows, h, f, {activated, f}, {&weights.w2[zone.weights], h}, &out[zone.row_h]);
  }
}

void Experts::backward(const ExpertWeights& weights, std::span<const std::int32_t> offsets,
                       std::span<const float> in, const Gradients& gradients) {
  const int h = sizes_.hidden, f = sizes_.inner;
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const Zone zone = zone_of(sizes_, offsets, e);
    float* const grad_w1 = &gradients.weights.w1[zone.weights];
    float* const grad_w2 = &gradients.weights.w2[zone.weights];
    if (zone.rows == 0) {
      std::fill_n(grad_w1, sizes_.expert_weights(), 0.0f);
      std::fill_n(grad_w2, sizes_.expert_weights(), 0.0f);
      continue;
    }
    const float* const grad_out = &gradients.out[zone.row_h];
    float* const grad_inner = &grad_inner_[zone.row_f];
    multiply(f, h, zone.rows, {&activated_[zone.row_f], f, true}, {grad_out, h}, grad_w2);
    multiply(zone.rows, f, h, {grad_out, h}, {&weights.w2[zone.weights], h, true}, grad_inner);
    for (int i = 0; i < zone.rows * f; ++i) {
      grad_inner[i] *= silu_derivative(inner_[zone.row_f + static_cast<std::size_t>(i)]);
    }
    multiply(h, f, zone.rows, {&in[zone.row_h], h, true}, {grad_inner, f}, grad_w1);
    multiply(zone.rows, h, f, {grad_inner, f}, {&weights.w1[zone.weights], f, true},
             &gradients.in[zone.row_h]);
  }
}

}  // namespace demo
