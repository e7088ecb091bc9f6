#include "conformance/numeric.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace xd::test {

Format format_of(DLDataType type) {
  if (type.code == kDLBfloat && type.bits == 16) return kFormatBf16;
  if (type.code == kDLFloat && type.bits == 16) return kFormatF16;
  if (type.code == kDLFloat && type.bits == 32) return kFormatF32;
  throw std::logic_error("no arithmetic in this element type");
}

float decode(std::uint32_t code, Format format) {
  const std::uint32_t magnitude = code & (format.sign_bit() - 1);
  const int exponent_field = static_cast<int>(magnitude >> format.mantissa_bits);
  const std::uint32_t mantissa = magnitude & ((1u << format.mantissa_bits) - 1);
  float value = 0;
  if (magnitude > format.max_finite()) {
    value = mantissa == 0 && format.has_infinity ? std::numeric_limits<float>::infinity()
                                                 : std::numeric_limits<float>::quiet_NaN();
  } else if (exponent_field == 0) {
    value = std::ldexp(static_cast<float>(mantissa), 1 - format.bias() - format.mantissa_bits);
  } else {
    value = std::ldexp(static_cast<float>(mantissa + (1u << format.mantissa_bits)),
                       exponent_field - format.bias() - format.mantissa_bits);
  }
  return code & format.sign_bit() ? -value : value;
}

std::uint32_t encode(float value, Format format) {
  const std::uint32_t sign = std::signbit(value) ? format.sign_bit() : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  if (std::isinf(value)) return sign | (format.max_finite() + 1);
  // Doubles hold every quotient below exactly, so that nearbyint sees the true ties.
  const int exponent = std::max(std::ilogb(magnitude), 1 - format.bias());
  const double steps = std::nearbyint(std::ldexp(magnitude, format.mantissa_bits - exponent));
  // Codes of one sign are consecutive numbers: a carry out of the mantissa raises the exponent.
  const std::int64_t code =
      (static_cast<std::int64_t>(exponent + format.bias() - 1) << format.mantissa_bits) +
      static_cast<std::int64_t>(steps);
  return sign | static_cast<std::uint32_t>(std::min<std::int64_t>(code, format.max_finite() + 1));
}

}  // namespace xd::test
