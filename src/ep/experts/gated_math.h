// The arithmetic of gated activations (xd_gated), on single numbers, for host and device. Every
// operation is rounded to float32 by itself: compile without fused multiply-add, and both give
// equal bits.
#pragma once

#include <crossdock/gated.h>

#include <bit>
#include <cstdint>
#include <type_traits>

namespace xd::ep::gated {

// Steps for which an executor may name quicker ones that give the same bits.
struct PlainArithmetic {
  // The larger one; y if x is a NaN.
  static constexpr float larger(float x, float y) { return x > y ? x : y; }
  // 1 / x, correctly rounded, of a number from 1 to 2^126; of others anything.
  static constexpr float reciprocal(float x) { return 1.0f / x; }
};

// 1 / (1 + exp(-z)), and 0 where exp(-z) has no place in float32. Of a NaN: any number.
//
// exp(y) is 2^n exp(r) with y = n ln 2 + r and |r| <= ln 2 / 2, the latter by the series of exp up
// to r^6, whose error is below 2^-23. Adding 1.5 * 2^23 rounds y / ln 2 to n, which then stands in
// the sum's low bits. ln 2 is cut in two, so that n times the first part is exact. n is added to
// the exponent of exp(r): where that has no room for it, the number is lost beside 1.
template <class Arithmetic>
constexpr float sigmoid(float z) {
  constexpr float kLimit = 87.0f, kRound = 12582912.0f;
  const float y = Arithmetic::larger(-z, -kLimit);
  const float shifted = y * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (y - n * 0.693359375f) - n * -2.12194440e-4f;
  float power = r * (1.0f / 720) + 1.0f / 120;
  power = power * r + 1.0f / 24;
  power = power * r + 1.0f / 6;
  power = power * r + 0.5f;
  power = power * r + 1.0f;
  power = power * r + 1.0f;
  const std::uint32_t bits =
      std::bit_cast<std::uint32_t>(power) + (std::bit_cast<std::uint32_t>(shifted) << 23);
  const float s = Arithmetic::reciprocal(std::bit_cast<float>(bits) + 1.0f);
  return z < -kLimit ? 0.0f : s;
}

struct Activated {
  float value, derivative;  // a(g), a'(g)
};

// g s(z), with z's derivative by g.
template <class Arithmetic>
constexpr Activated gate_by(float g, float z, float slope) {
  const float s = sigmoid<Arithmetic>(z);
  const float value = g * s;
  const float bend = value * (1.0f - s);
  return {value, bend == 0.0f ? s : s + bend * slope};  // a slope may be infinite
}

template <xd_gated_activation kActivation, class Arithmetic>
constexpr Activated activate(float g) {
  if constexpr (kActivation == XD_GATED_SILU) {
    return gate_by<Arithmetic>(g, g, 1.0f);
  } else if constexpr (kActivation == XD_GATED_GELU_TANH) {
    const float square = g * g;
    const float inner = square * 0.0713548163f;
    return gate_by<Arithmetic>(g, g * (inner + 1.5957691216f), inner * 3.0f + 1.5957691216f);
  } else {
    const float positive = g > 0.0f ? g : g == g ? 0.0f : g;
    if constexpr (kActivation == XD_GATED_RELU) return {positive, g > 0.0f ? 1.0f : 0.0f};
    return {positive * positive, positive * 2.0f};
  }
}

// A row's element of the forward call. `weight` is 1 where there are no weights, which changes no
// bit.
template <xd_gated_activation kActivation, class Arithmetic = PlainArithmetic>
constexpr float forward(float gate, float up, float weight) {
  return activate<kActivation, Arithmetic>(gate).value * up * weight;
}

struct Gradients {
  float gate, up, weight;  // the last is the element's term
};

template <xd_gated_activation kActivation, class Arithmetic = PlainArithmetic>
constexpr Gradients backward(float grad, float gate, float up, float weight) {
  const Activated a = activate<kActivation, Arithmetic>(gate);
  const float scaled = grad * weight;
  return {(scaled * up) * a.derivative, scaled * a.value, grad * (a.value * up)};
}

// Calls body(constant) with the activation as a std::integral_constant.
template <class Body>
void with_activation(xd_gated_activation activation, Body&& body) {
  switch (activation) {
    case XD_GATED_SILU:
      return body(std::integral_constant<xd_gated_activation, XD_GATED_SILU>());
    case XD_GATED_GELU_TANH:
      return body(std::integral_constant<xd_gated_activation, XD_GATED_GELU_TANH>());
    case XD_GATED_RELU:
      return body(std::integral_constant<xd_gated_activation, XD_GATED_RELU>());
    case XD_GATED_RELU_SQUARED:
      return body(std::integral_constant<xd_gated_activation, XD_GATED_RELU_SQUARED>());
  }
}

}  // namespace xd::ep::gated
