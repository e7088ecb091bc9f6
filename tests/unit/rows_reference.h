// The results that the row arithmetic must give, in double and integer arithmetic, one element at a
// time. Number formats and quantising are those of the conformance tests.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <span>
#include <vector>

#include "conformance/numeric.h"
#include "conformance/quantised.h"

namespace rows_reference {

using xd::test::decode;
using xd::test::Format;

// The nearest code of a value, ties to even. NaN gives the quiet NaN without sign and payload.
inline std::uint32_t encode(double value, const Format& f) {
  const std::uint32_t infinity = f.max_finite() + 1;
  if (std::isnan(value)) return infinity | 1u << (f.mantissa_bits - 1);
  return xd::test::encode(static_cast<float>(value), f);
}

// float32 results of double operations: the second rounding does no harm to one sum or product of
// float32 numbers, because 53 >= 2 * 24 + 2.
inline double add(double a, double b) { return static_cast<float>(a + b); }
inline double mul(double a, double b) { return static_cast<float>(a * b); }

inline std::uint32_t quieted(const Format& f, std::uint32_t code) {
  return std::isnan(decode(code, f)) ? code | 1u << (f.mantissa_bits - 1) : code;
}

// Element i of a sum: partials of codes with optional weights.
struct Term {
  std::uint32_t code;
  float weight;
};
inline std::uint32_t sum(const Format& f, const std::vector<std::vector<Term>>& partials,
                         bool weighted) {
  if (!weighted && partials.size() == 1 && partials[0].size() == 1) {
    return quieted(f, partials[0][0].code);
  }
  double total = 0;
  for (std::size_t p = 0; p < partials.size(); ++p) {
    double partial = 0;
    for (std::size_t t = 0; t < partials[p].size(); ++t) {
      const Term& term = partials[p][t];
      const double x = decode(term.code, f);
      const double y = weighted ? mul(x, term.weight) : x;
      partial = t == 0 ? y : add(partial, y);
    }
    const double rounded = decode(encode(partial, f), f);
    total = p == 0 ? rounded : add(total, rounded);
  }
  return encode(total, f);
}

inline float dot(const Format& f, const std::vector<std::uint32_t>& a,
                 const std::vector<std::uint32_t>& b) {
  double sums[16] = {};
  for (std::size_t i = 0; i < a.size(); ++i) {
    sums[i % 16] = add(sums[i % 16], mul(decode(a[i], f), decode(b[i], f)));
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] = add(sums[j], sums[j + half]);
  }
  return std::bit_cast<float>(encode(sums[0], xd::test::kFormatF32));
}

}  // namespace rows_reference
