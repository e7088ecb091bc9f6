#include "conformance/quantised.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "conformance/numeric.h"
#include "support/tensor.h"

namespace xd::test {
namespace {

// In float32, and exact where it is a power of two.
float scale_of(const QuantisedWay& way, float amax) {
  if (amax == 0 && way.scale_type.bits == 32) return 1.0f;
  if (!way.powers_of_two) return std::max(amax / 448.0f, std::ldexp(1.0f, way.least_exponent));
  int exponent = way.least_exponent;
  while (std::ldexp(448.0, exponent) < static_cast<double>(amax)) ++exponent;
  return std::ldexp(1.0f, exponent);
}

std::uint32_t scale_code(const QuantisedWay& way, float scale) {
  return way.scale_type.bits == 32 ? std::bit_cast<std::uint32_t>(scale)
                                   : static_cast<std::uint32_t>(std::ilogb(scale) + 127);
}

std::uint8_t element_of(std::uint16_t code, float reciprocal) {
  const float x = decode(code, kFormatBf16);
  const bool negative = (code & kFormatBf16.sign_bit()) != 0;
  if (std::isnan(x)) return negative ? 0xff : 0x7f;
  const float limited = std::clamp(x * reciprocal, -448.0f, 448.0f);
  return static_cast<std::uint8_t>(encode(limited, kFormatE4m3));
}

xd_ep_quantise codes_of(xd_ep_wire wire) {
  switch (wire) {
    case XD_EP_WIRE_FP8_BLOCK128:
      return XD_EP_QUANTISE_FP8_BLOCK128;
    case XD_EP_WIRE_FP8_BLOCK128_POW2:
      return XD_EP_QUANTISE_FP8_BLOCK128_POW2;
    case XD_EP_WIRE_FP8_BLOCK128_E8M0:
      return XD_EP_QUANTISE_FP8_BLOCK128_E8M0;
    default:
      return XD_EP_QUANTISE_NONE;
  }
}

}  // namespace

QuantisedWay quantised_way(xd_ep_quantise way) {
  switch (way) {
    case XD_EP_QUANTISE_FP8_BLOCK128_POW2:
      return {way, 128, kF32, true, -126};
    case XD_EP_QUANTISE_FP8_BLOCK128_E8M0:
      return {way, 128, kE8m0, true, -127};
    case XD_EP_QUANTISE_MXFP8:
      return {way, 32, kE8m0, true, -127};
    default:
      return {way, 128, kF32, false, -126};
  }
}

QuantisedBlock quantised_block(const QuantisedWay& way, std::span<const std::uint16_t> codes) {
  float amax = 0;
  for (const std::uint16_t code : codes) {
    const float x = std::fabs(decode(code, kFormatBf16));
    if (std::isfinite(x)) amax = std::max(amax, x);
  }
  const float scale = scale_of(way, amax);
  QuantisedBlock block;
  for (const std::uint16_t code : codes) block.elements.push_back(element_of(code, 1.0f / scale));
  block.scale = scale_code(way, scale);
  return block;
}

QuantisedBlock coded_block(const QuantisedWay& way, std::span<const float> numbers) {
  float amax = 0;
  for (const float x : numbers) {
    if (std::isfinite(x)) amax = std::max(amax, std::fabs(x));
  }
  const float scale = scale_of(way, amax), reciprocal = 1.0f / scale;
  QuantisedBlock block;
  for (const float x : numbers) {
    const float limited = std::clamp(x * reciprocal, -448.0f, 448.0f);
    const std::uint32_t code = std::isfinite(x) ? encode(limited, kFormatE4m3) : 0x7f;
    block.elements.push_back(static_cast<std::uint8_t>(code));
  }
  block.scale = scale_code(way, scale);
  return block;
}

std::vector<float> through_wire(xd_ep_wire wire, const std::vector<float>& sum) {
  if (wire == XD_EP_WIRE_FLOAT32) return sum;
  constexpr std::size_t kBlock = 128;
  const QuantisedWay way = quantised_way(codes_of(wire));
  std::vector<float> arrived;
  for (std::size_t first = 0; first < sum.size(); first += kBlock) {
    const QuantisedBlock block = coded_block(way, std::span(sum).subspan(first, kBlock));
    const float scale = way.scale_type.bits == 32
                            ? std::bit_cast<float>(block.scale)
                            : std::ldexp(1.0f, static_cast<int>(block.scale) - 127);
    for (const std::uint8_t code : block.elements) {
      arrived.push_back(decode(code, kFormatE4m3) * scale);
    }
  }
  return arrived;
}

}  // namespace xd::test
