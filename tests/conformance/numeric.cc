#include "conformance/numeric.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <stdexcept>

namespace xd::test {
namespace {

// Powers of two by their bits, since ldexp would take most of the time of some suites.
float power_of_two(int exponent) {  // of a normal float
  return std::bit_cast<float>(static_cast<std::uint32_t>(exponent + 127) << 23);
}
double double_power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<std::uint64_t>(exponent + 1023) << 52);
}
int exponent_of(double normal) {
  return static_cast<int>(std::bit_cast<std::uint64_t>(normal) >> 52 & 0x7ff) - 1023;
}

}  // namespace

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
    const float steps = static_cast<float>(mantissa) * power_of_two(-format.mantissa_bits);
    value = (1 + steps) * power_of_two(exponent_field - format.bias());
  }
  return code & format.sign_bit() ? -value : value;
}

std::uint32_t encode(float value, Format format) {
  const std::uint32_t sign = std::signbit(value) ? format.sign_bit() : 0;
  const double magnitude = std::fabs(static_cast<double>(value));
  if (magnitude == 0) return sign;
  if (std::isinf(value)) return sign | (format.max_finite() + 1);
  // Doubles hold every quotient below exactly, so that nearbyint sees the true ties.
  const int exponent = std::max(exponent_of(magnitude), 1 - format.bias());
  const double steps =
      std::nearbyint(magnitude * double_power_of_two(format.mantissa_bits - exponent));
  // Codes of one sign are consecutive numbers: a carry out of the mantissa raises the exponent.
  const std::int64_t code =
      (static_cast<std::int64_t>(exponent + format.bias() - 1) << format.mantissa_bits) +
      static_cast<std::int64_t>(steps);
  return sign | static_cast<std::uint32_t>(std::min<std::int64_t>(code, format.max_finite() + 1));
}

}  // namespace xd::test
