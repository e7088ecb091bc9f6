// The results that the row arithmetic must give, written from the formats' definitions in double
// and integer arithmetic, one element at a time.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include <crossdock/ep.h>

namespace rows_reference {

// A binary floating-point format by its parameters.
struct Format {
  int bits;
  int mantissa;
  int bias;
  int exponent_max() const { return (1 << (bits - 1 - mantissa)) - 1; }  // infinity and NaN
};
inline constexpr Format kBf16{16, 7, 127};
inline constexpr Format kF16{16, 10, 15};
inline constexpr Format kF32{32, 23, 127};

inline double decode(const Format& f, std::uint32_t code) {
  const std::uint32_t fraction = code & ((1u << f.mantissa) - 1);
  const int exponent = static_cast<int>(code >> f.mantissa) & f.exponent_max();
  const double sign = (code >> (f.bits - 1)) != 0 ? -1.0 : 1.0;
  if (exponent == f.exponent_max()) {
    return fraction != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double significand = exponent == 0 ? fraction : fraction + std::ldexp(1.0, f.mantissa);
  return sign * std::ldexp(significand, (exponent == 0 ? 1 : exponent) - f.bias - f.mantissa);
}

// The nearest code of a value, ties to even. NaN gives the quiet NaN without sign and payload.
inline std::uint32_t encode(const Format& f, double value) {
  const std::uint32_t infinity = static_cast<std::uint32_t>(f.exponent_max()) << f.mantissa;
  if (std::isnan(value)) return infinity | 1u << (f.mantissa - 1);
  const std::uint32_t sign = std::signbit(value) ? 1u << (f.bits - 1) : 0;
  if (std::isinf(value)) return sign | infinity;
  if (value == 0) return sign;
  int exponent = 0;
  std::frexp(value, &exponent);  // |value| in [2^(exponent - 1), 2^exponent)
  const int lowest = 1 - f.bias;
  const int scale = (exponent - 1 < lowest ? lowest : exponent - 1) - f.mantissa;
  const double steps = std::nearbyint(std::fabs(std::ldexp(value, -scale)));
  // `steps` includes the hidden bit, so it carries into the exponent by itself.
  const auto code = static_cast<std::uint64_t>(steps) +
                    (static_cast<std::uint64_t>(scale + f.mantissa - lowest) << f.mantissa);
  return sign | (code >= infinity ? infinity : static_cast<std::uint32_t>(code));
}

// float32 results of double operations: the second rounding does no harm to one sum, product or
// quotient of float32 numbers, because 53 >= 2 * 24 + 2.
inline double add(double a, double b) { return static_cast<float>(a + b); }
inline double mul(double a, double b) { return static_cast<float>(a * b); }
inline double div(double a, double b) { return static_cast<float>(a / b); }

inline std::uint32_t quieted(const Format& f, std::uint32_t code) {
  return std::isnan(decode(f, code)) ? code | 1u << (f.mantissa - 1) : code;
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
      const double x = decode(f, term.code);
      const double y = weighted ? mul(x, term.weight) : x;
      partial = t == 0 ? y : add(partial, y);
    }
    const double rounded = decode(f, encode(f, partial));
    total = p == 0 ? rounded : add(total, rounded);
  }
  return encode(f, total);
}

inline float dot(const Format& f, const std::vector<std::uint32_t>& a,
                 const std::vector<std::uint32_t>& b) {
  double sums[16] = {};
  for (std::size_t i = 0; i < a.size(); ++i) {
    sums[i % 16] = add(sums[i % 16], mul(decode(f, a[i]), decode(f, b[i])));
  }
  for (int half = 8; half > 0; half /= 2) {
    for (int j = 0; j < half; ++j) sums[j] = add(sums[j], sums[j + half]);
  }
  return std::bit_cast<float>(encode(kF32, sums[0]));
}

// e4m3fn has no infinity and two NaN codes; every other code of its 15 exponents is a number.
inline std::uint8_t e4m3(double value, bool nan) {
  if (nan) return std::signbit(value) ? 0xff : 0x7f;
  const double limited = std::fmax(-448.0, std::fmin(448.0, value));
  const std::uint8_t magnitude =
      static_cast<std::uint8_t>(encode({9, 3, 7}, std::fabs(limited)));  // a wider exponent field
  return static_cast<std::uint8_t>(magnitude | (std::signbit(value) ? 0x80 : 0));
}

// A way of quantising: a line of the table of xd_ep_quantise.
struct Way {
  xd_ep_quantise quantise;
  int block;
  bool powers;
  int least_exponent;  // least exponent of a power of two
  bool bytes;          // e8m0 scales
  const char* name;
};
inline constexpr Way kWays[] = {
    {XD_EP_QUANTISE_FP8_BLOCK128, 128, false, -126, false, "FP8_BLOCK128"},
    {XD_EP_QUANTISE_FP8_BLOCK128_POW2, 128, true, -126, false, "FP8_BLOCK128_POW2"},
    {XD_EP_QUANTISE_FP8_BLOCK128_E8M0, 128, true, -127, true, "FP8_BLOCK128_E8M0"},
    {XD_EP_QUANTISE_MXFP8, 32, true, -127, true, "MXFP8"}};

struct QuantisedBlock {
  std::vector<std::uint8_t> elements;
  std::uint32_t scale;  // float32 bits, or the e8m0 byte
};

inline double scale_of(const Way& way, double amax) {
  if (amax == 0 && !way.bytes) return 1;
  if (!way.powers) return std::fmax(div(amax, 448), std::ldexp(1.0, way.least_exponent));
  int e = way.least_exponent;
  while (std::ldexp(448.0, e) < amax) ++e;
  return std::ldexp(1.0, e);
}

inline QuantisedBlock quantised(const Way& way, const std::vector<std::uint32_t>& codes) {
  double amax = 0;
  for (const auto code : codes) {
    const double x = std::fabs(decode(kBf16, code));
    if (std::isfinite(x)) amax = std::fmax(amax, x);
  }
  const double scale = scale_of(way, amax), reciprocal = div(1, scale);
  QuantisedBlock block;
  block.scale =
      way.bytes ? static_cast<std::uint32_t>(std::ilogb(scale) + 127) : encode(kF32, scale);
  for (const auto code : codes) {
    const double x = decode(kBf16, code);
    const double sign = (code & 0x8000) != 0 ? -1.0 : 1.0;
    block.elements.push_back(e4m3(std::isnan(x) ? sign : mul(x, reciprocal), std::isnan(x)));
  }
  return block;
}

}  // namespace rows_reference
