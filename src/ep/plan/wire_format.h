// The properties in which the wires of combine (xd_ep_wire) differ.
#pragma once

#include <crossdock/quantise.h>

#include <cstdint>

#include "ep/plan/quantise.h"

namespace xd::ep {

inline constexpr int kNumWires = 5;

struct WireFormat {
  xd_ep_wire wire = XD_EP_WIRE_SAME;
  QuantiseFormat codes{};  // of FP8_*

  // True if partial sums do not cross in the payload type.
  explicit constexpr operator bool() const { return wire != XD_EP_WIRE_SAME; }
  constexpr bool is_float() const { return wire == XD_EP_WIRE_FLOAT32; }

  // Bytes of a partial sum of so many columns; codes come first, then their scales.
  constexpr std::uint64_t row_bytes(std::uint64_t columns, std::uint64_t payload_bytes) const {
    if (is_float()) return columns * sizeof(float);
    return codes ? columns + codes.scale_row_bytes(columns) : payload_bytes;
  }
};

constexpr xd_ep_quantise codes_of(xd_ep_wire wire) {
  switch (wire) {
    case XD_EP_WIRE_SAME:
    case XD_EP_WIRE_FLOAT32:
      break;
    case XD_EP_WIRE_FP8_BLOCK128:
      return XD_EP_QUANTISE_FP8_BLOCK128;
    case XD_EP_WIRE_FP8_BLOCK128_POW2:
      return XD_EP_QUANTISE_FP8_BLOCK128_POW2;
    case XD_EP_WIRE_FP8_BLOCK128_E8M0:
      return XD_EP_QUANTISE_FP8_BLOCK128_E8M0;
  }
  return XD_EP_QUANTISE_NONE;
}

constexpr WireFormat wire_format(xd_ep_wire wire) {
  return {.wire = wire, .codes = quantise_format(codes_of(wire))};
}

// The name of a wire as in the header, without its prefix.
constexpr const char* wire_name(xd_ep_wire wire) {
  if (wire == XD_EP_WIRE_SAME) return "SAME";
  return wire == XD_EP_WIRE_FLOAT32 ? "FLOAT32" : quantise_name(codes_of(wire));
}

// Bytes of the longest partial sum that calls may have whose rows have at most `row_bytes`: 16-bit
// elements become twice as long as float32, and all else is shorter than its row.
constexpr std::uint64_t longest_wire_row(std::uint32_t wire_formats, std::uint64_t row_bytes) {
  return (wire_formats & XD_EP_WIRE_BIT(XD_EP_WIRE_FLOAT32)) != 0 ? 2 * row_bytes : row_bytes;
}

}  // namespace xd::ep
