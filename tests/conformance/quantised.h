// The rows that dispatch must make when it quantises, block by block and element by element, from
// the text of xd_ep_quantise in quantise.h.
#pragma once

#include <crossdock/quantise.h>
#include <dlpack/dlpack.h>

#include <cstdint>
#include <span>
#include <vector>

namespace xd::test {

// Columns of the table in ep.h.
struct QuantisedWay {
  xd_ep_quantise way;
  std::int64_t block;
  DLDataType scale_type;  // float32, or float8_e8m0fnu (uint8 is taken as well)
  bool powers_of_two;
  int least_exponent;  // bound of the scale's exponent
};

inline constexpr xd_ep_quantise kWaysToQuantise[] = {
    XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2, XD_EP_QUANTISE_FP8_BLOCK128_E8M0,
    XD_EP_QUANTISE_MXFP8};

QuantisedWay quantised_way(xd_ep_quantise way);

struct QuantisedBlock {
  std::vector<std::uint8_t> elements;  // e4m3 codes
  std::uint32_t scale;                 // code of the scale's type
};

// Quantises one block of bf16 codes.
QuantisedBlock quantised_block(const QuantisedWay& way, std::span<const std::uint16_t> codes);

// Quantises one block of float32 numbers as a wire does: what is not finite becomes 0x7f.
QuantisedBlock coded_block(const QuantisedWay& way, std::span<const float> numbers);

// A rank's partial sum of a token as its source adds it under a wire (xd_ep_wire): block by block
// through codes and a scale, or unchanged with FLOAT32.
std::vector<float> through_wire(xd_ep_wire wire, const std::vector<float>& sum);

}  // namespace xd::test
