// The properties in which the ways of xd_ep_quantise differ, for hosts and kernels.
#pragma once

#include <crossdock/ep.h>

#include <cstdint>

namespace xd::ep {

struct QuantiseFormat {
  std::uint32_t block = 0;        // columns that share a scale; 0 = rows are not quantised
  std::uint32_t scale_bytes = 0;  // bytes of a scale: 4 = float32, 1 = e8m0
  bool powers = false;            // scales are powers of two

  explicit constexpr operator bool() const { return block != 0; }
  constexpr std::uint64_t scale_row_bytes(std::uint64_t columns) const {
    return block == 0 ? 0 : columns / block * scale_bytes;
  }
};

constexpr QuantiseFormat quantise_format(xd_ep_quantise way) {
  switch (way) {
    case XD_EP_QUANTISE_NONE:
      break;
    case XD_EP_QUANTISE_FP8_BLOCK128:
      return {.block = XD_EP_QUANTISE_BLOCK(way), .scale_bytes = 4, .powers = false};
    case XD_EP_QUANTISE_FP8_BLOCK128_POW2:
      return {.block = XD_EP_QUANTISE_BLOCK(way), .scale_bytes = 4, .powers = true};
    case XD_EP_QUANTISE_FP8_BLOCK128_E8M0:
    case XD_EP_QUANTISE_MXFP8:
      return {.block = XD_EP_QUANTISE_BLOCK(way), .scale_bytes = 1, .powers = true};
  }
  return {};
}

// The name of a way as in the header, without its prefix.
constexpr const char* quantise_name(xd_ep_quantise way) {
  switch (way) {
    case XD_EP_QUANTISE_NONE:
      return "NONE";
    case XD_EP_QUANTISE_FP8_BLOCK128:
      return "FP8_BLOCK128";
    case XD_EP_QUANTISE_FP8_BLOCK128_POW2:
      return "FP8_BLOCK128_POW2";
    case XD_EP_QUANTISE_FP8_BLOCK128_E8M0:
      return "FP8_BLOCK128_E8M0";
    case XD_EP_QUANTISE_MXFP8:
      return "MXFP8";
  }
  return "unknown";
}

// Bytes of scales beside a row whose bf16 original has `row_bytes`. They are equal for every way: a
// float32 per 128 columns, or a byte per 32.
constexpr std::uint64_t quantised_scale_bytes(std::uint64_t row_bytes) {
  return row_bytes / 2 / 32;
}

}  // namespace xd::ep
