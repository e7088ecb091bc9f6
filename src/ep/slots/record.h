// The entry record of the operations of low latency (turn/entry.h): what a rank tells about its
// send half, beside its rows.
#pragma once

#include <cstdint>

#include "base/rank_bits.h"
#include "ep/slots/calls.h"
#include "turn/entry.h"

namespace xd::ep {

enum LlRecordFlags : std::uint8_t { kWeighted = 1 << 0 };

// The scales that callers give beside the rows of a dispatch, in the 16 bits in which its record
// has an xd_ep_quantise otherwise.
struct LlScales {
  std::uint32_t columns = 0;  // 0 = none are given
  std::uint32_t element = 0;  // bytes: 1 or 4

  static constexpr std::uint16_t kGiven = 1 << 15, kWide = 1 << 14;
  static_assert(XD_LL_MAX_SCALES < kWide);

  explicit constexpr operator bool() const { return columns != 0; }
  constexpr std::uint64_t row_bytes() const { return std::uint64_t{columns} * element; }
  constexpr std::uint16_t word() const {
    return static_cast<std::uint16_t>(kGiven | (element == 4 ? kWide : 0) | columns);
  }
  static constexpr LlScales of(std::uint16_t word) {
    if ((word & kGiven) == 0) return {};
    return {word & (kWide - 1u), (word & kWide) != 0 ? 4u : 1u};
  }
};

// Everything up to the fingerprint must be equal on all ranks.
struct LlRecord {
  turn::Call call{};             // an xd_ll_operation
  std::uint8_t dtype = 0;        // a DType: of the rows that the caller gives
  std::uint8_t flags = 0;        // kWeighted
  std::uint32_t row_bytes = 0;   // of the rows that the caller gives
  std::uint16_t quantise = 0;    // dispatch: an xd_ep_quantise, or LlScales; combine: an xd_ep_wire
  std::uint16_t max_tokens = 0;  // dispatch, but into slots: the most tokens of a rank
  std::uint32_t topk = 0;
  std::uint64_t fingerprint = 0;  // combine: its plan's; else the hash of the table of slots
  std::uint32_t tokens = 0;       // T of the sender
  std::uint32_t bad_ids = 0;      // dispatch: of the sender
  RankBits mask{};                // the ranks that the sender leaves out
  // dispatch: a DType, where the sender gives scales. Records of all families have one size.
  std::uint64_t scale_type = 0;
};
static_assert(turn::is_record<LlRecord>);

// True if two ranks that are in the same operation also agree about its arguments. Host and device
// ask it.
constexpr bool same_operation(const LlRecord& a, const LlRecord& b) {
  return a.fingerprint == b.fingerprint && a.dtype == b.dtype && a.row_bytes == b.row_bytes &&
         a.quantise == b.quantise && a.max_tokens == b.max_tokens && a.topk == b.topk &&
         a.flags == b.flags;
}

// The way in which a dispatch quantises its rows.
constexpr xd_ep_quantise quantise_of(const LlRecord& dispatch) {
  return LlScales::of(dispatch.quantise) ? XD_EP_QUANTISE_NONE
                                         : static_cast<xd_ep_quantise>(dispatch.quantise);
}
// Bytes of a row of a dispatch as it travels, and of the scales behind it.
std::uint64_t sent_row_bytes(const LlRecord& dispatch);
std::uint64_t sent_scale_bytes(const LlRecord& dispatch);

// The part that must be equal, except for the fingerprint, and the sender's T.
LlRecord record_of(const LlDispatchSend& call);
// `topk` and `tokens` are the plan's.
LlRecord record_of(const LlCombineSend& call, int topk, int tokens);

// Throws INVALID_ARGUMENT where a receive half does not fit what this rank has sent.
void require_fits(const LlDispatchReceive& call, const LlRecord& sent);
void require_fits(const LlCombineReceive& call, const LlRecord& sent);

}  // namespace xd::ep
