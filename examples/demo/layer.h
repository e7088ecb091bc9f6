// The mixture-of-experts layer of the demo: what it computes, in sizes and formulas.
//
//   logits = x Wr                            [E]     router
//   k = 1..K: expert e[k], the K largest logits;  w[k] = softmax over these K logits
//   y = sum over k of w[k] * silu(x W1[e[k]]) W2[e[k]]
//   loss = sum over all tokens of |y - target|^2 / (2 * number of tokens)
//
// Matrices are row-major float32: Wr [H,E], W1[e] [H,F], W2[e] [F,H].
#pragma once

#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

namespace demo {

struct Sizes {
  int ranks = 1;
  int tokens = 1024;  // T, per rank and step
  int hidden = 128;   // H
  int inner = 256;    // F
  int experts = 16;   // E
  int topk = 2;       // K

  int local_experts() const { return experts / ranks; }
  int all_tokens() const { return ranks * tokens; }
  std::size_t expert_weights() const { return std::size_t(hidden) * std::size_t(inner); }
  std::size_t router_weights() const { return std::size_t(hidden) * std::size_t(experts); }
};

inline float silu(float x) { return x / (1.0f + std::exp(-x)); }
inline float silu_derivative(float x) {
  const float s = 1.0f / (1.0f + std::exp(-x));
  return s * (1.0f + x * (1.0f - s));
}

// Uniform in [-scale, scale), a function of seed and index only, so that every rank can make its
// own part of a table.
float seeded(std::uint64_t seed, std::uint64_t index, float scale);
void fill_seeded(std::span<float> values, std::uint64_t seed, float scale);

}  // namespace demo
