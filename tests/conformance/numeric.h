// Small floating-point formats by their definition, one element at a time. Tests compare the
// library's vector code with them, so they are slow and plain on purpose.
#pragma once

#include <dlpack/dlpack.h>

#include <cstdint>

namespace xd::test {

struct Format {
  int bytes;
  int exponent_bits;
  int mantissa_bits;
  bool has_infinity;  // if not, the largest exponent holds numbers too (e4m3fn)

  constexpr int bias() const { return (1 << (exponent_bits - 1)) - 1; }
  // Code of the largest finite number.
  constexpr std::uint32_t max_finite() const {
    const std::uint32_t all_ones = (1u << (exponent_bits + mantissa_bits)) - 1;
    return has_infinity ? all_ones - (1u << mantissa_bits) : all_ones - 1;
  }
  constexpr std::uint32_t sign_bit() const { return 1u << (exponent_bits + mantissa_bits); }
};

inline constexpr Format kFormatBf16{2, 8, 7, true};
inline constexpr Format kFormatF16{2, 5, 10, true};
inline constexpr Format kFormatF32{4, 8, 23, true};
inline constexpr Format kFormatE4m3{1, 4, 3, false};

// bf16, fp16 or fp32.
Format format_of(DLDataType type);

float decode(std::uint32_t code, Format format);

// Rounds to nearest, ties to even. A value that is too large becomes infinity, or NaN in a format
// without infinity. `value` is no NaN.
std::uint32_t encode(float value, Format format);

}  // namespace xd::test
