// Parts of a plan: which experts belong to a part, and which rows a call with a part moves. Every
// place that asks is here, for host and device.
//
// Bounds of a rank are the first rows behind its parts 1 to P - 1, [P-1]. A part without rows has
// the bound of the part before it.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>
#include <cstdint>

namespace xd::ep {

inline constexpr int kMaxParts = XD_EP_MAX_PARTS;

// The first local expert of a part, from 1; of part P + 1: L.
constexpr int first_expert_of_part(int part, int parts, int local_experts) {
  return static_cast<int>(std::int64_t{part - 1} * local_experts / parts);
}

// The part of a row, from 1.
constexpr int part_of_row(std::int64_t row, const std::int32_t* bounds, int parts) {
  int part = 1;
  for (int i = 0; i + 1 < parts; ++i) part += bounds[i] <= row ? 1 : 0;
  return part;
}

// The parts of a token's rows at one rank. A row that crosses once for all of them does so in the
// first of these parts, and the rows' sum in the last one.
struct PartSpan {
  int first = kMaxParts + 1, last = 0;

  constexpr void add(int part) {
    first = std::min(first, part);
    last = std::max(last, part);
  }
};

// The part that a call is about.
struct CallPart {
  int part = 0;  // from 1; 0 = the whole operation
  int parts = 1;

  constexpr bool whole() const { return part == 0; }
  // True if no part of the operation comes before it, or behind it.
  constexpr bool begins() const { return part <= 1; }
  constexpr bool ends() const { return part == 0 || part == parts; }
};

// Plans with parts leave these bits of their fingerprints 0, and records have the part there: so
// ranks that call different parts disagree like ranks with different plans.
inline constexpr std::uint64_t kPartBits = 31;
static_assert(kMaxParts <= kPartBits);

}  // namespace xd::ep
