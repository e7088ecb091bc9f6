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

// The rows of one part in a rank's receive tensor: [first, end).
struct PartRows {
  std::uint32_t first = 0, end = 0xFFFFFFFF;

  constexpr bool has(std::uint32_t row) const { return row >= first && row < end; }
  // Whether a row is of an earlier part, or of a later one.
  constexpr bool is_earlier(std::uint32_t row) const { return row < first; }
  constexpr bool is_later(std::uint32_t row) const { return row >= end; }
};

// Whether a call with a part deals with a token's rows at one rank, given as bits: some of them are
// `here`, in its part, and none is `beyond`: in an earlier part where rows move, in a later one
// where they are summed. So it is the call of PartSpan::first or PartSpan::last.
constexpr bool is_due(unsigned rows, unsigned here, unsigned beyond) {
  return (rows & here) != 0 && (rows & beyond) == 0;
}

// The part that a call is about.
struct CallPart {
  int part = 0;  // from 1; 0 = the whole operation
  int parts = 1;

  constexpr bool whole() const { return part == 0; }
  // True if no part of the operation comes before it, or behind it.
  constexpr bool begins() const { return part <= 1; }
  constexpr bool ends() const { return part == 0 || part == parts; }
};

constexpr PartRows rows_of_part(const CallPart& call, const std::int32_t* bounds) {
  PartRows rows;
  if (call.part > 1) rows.first = static_cast<std::uint32_t>(bounds[call.part - 2]);
  if (!call.ends()) rows.end = static_cast<std::uint32_t>(bounds[call.part - 1]);
  return rows;
}

// The rows that a call deals with: all of the plan, or those of one part, or none.
struct Scope {
  int part = 0;  // 0 = all
  bool empty = false;
  bool tail = true;  // also the rows past the last zone

  constexpr bool has(int other) const { return !empty && (part == 0 || part == other); }
  // The local experts whose zones these are: [first, end).
  constexpr int first_expert(int parts, int local_experts) const {
    return part == 0 ? 0 : first_expert_of_part(part, parts, local_experts);
  }
  constexpr int end_expert(int parts, int local_experts) const {
    return part == 0 ? local_experts : first_expert_of_part(part + 1, parts, local_experts);
  }
};

// Between machines one call does the work of all: the first one of those that move rows, and the
// last one of sums. `works_there`: it is that one.
constexpr Scope scope_of(const CallPart& call, bool between_machines, bool works_there) {
  return {.part = between_machines ? 0 : call.part,
          .empty = between_machines && !works_there,
          .tail = call.ends()};
}

// Plans with parts leave these bits of their fingerprints 0, and records have the part there: so
// ranks that call different parts disagree like ranks with different plans.
inline constexpr std::uint64_t kPartBits = 31;
static_assert(kMaxParts <= kPartBits);

}  // namespace xd::ep
