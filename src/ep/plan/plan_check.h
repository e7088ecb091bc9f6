// The faults that a plan can have: one set of checks for host and device, and one text for each
// fault.
//
// Hosts and kernels read a plan in different ways (one thread, or a whole block at once), so each
// gathers its findings and asks here what they mean. All ranks come to the same verdict about their
// plans, whichever executor they have.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <string>

#include "ep/plan/plan.h"

namespace xd::ep {

enum class PlanFault : std::int32_t {
  none,
  no_plan,       // magic
  version,       // got, expected
  header,        // damaged
  cut_short,     // got bytes, expected
  checksum,      // damaged
  zones,         // damaged
  family,        // made by the other kind of groups; got its layout
  binding,       // made for kBindingNames[which] = got, used with expected
  capacities,    // made for other capacities of the peers
  expert_ranks,  // made for another expert map
  hosts,         // made for ranks on other hosts
  too_large,     // got tokens, expected top-k: beyond the group's bounds
  alignment,     // got, expected at most
  tensor_rows,   // `name` has got rows, expected at least
  tokens,        // `name` has got rows, expected tokens of the plan
  topk,          // `name` has got columns, expected top-k of the plan
  part,          // got, expected at most
};

struct Fault {
  PlanFault kind = PlanFault::none;
  std::int32_t which = 0;      // binding: index into kBindingNames
  const char* name = nullptr;  // text in the host's memory; kernels only hand it back
  std::int64_t got = 0, expected = 0;

  constexpr explicit operator bool() const { return kind != PlanFault::none; }
};

// The values that plans of a group must agree with.
struct PlanTerms {
  std::int32_t rank, ranks, experts, layout, keeps_list, keeps_items, overflow;
  std::int32_t max_tokens, max_topk;
  std::int64_t alignment;  // the largest
  std::int64_t capacity;
  std::uint64_t capacities;  // hash of all ranks'
  std::int32_t local_experts;
  std::uint64_t expert_ranks;  // hash of the expert map
  std::uint64_t hosts;         // HostMap::fingerprint()
};
PlanTerms terms_of(const PlanBinding& binding);

// A plan that passes header_fault() is one of this version with all its bytes.
constexpr Fault header_fault(const PlanHeader& h, std::uint64_t plan_bytes) {
  if (h.magic != PlanHeader::kMagic) return {.kind = PlanFault::no_plan};
  const std::uint32_t version = h.version & ~PlanHeader::kHasParts;
  if (version != PlanHeader::kVersion) {
    return {.kind = PlanFault::version, .got = version, .expected = PlanHeader::kVersion};
  }
  const int parts = parts_of(h), fewest = version != h.version ? 2 : 1;
  if (!plausible(h) || parts < fewest || parts > kMaxParts) return {.kind = PlanFault::header};
  const PlanExtent extent = extent_of(h, parts);
  if (h.bytes != extent.end) return {.kind = PlanFault::header};
  if (plan_bytes < extent.end) {
    return {.kind = PlanFault::cut_short,
            .got = static_cast<std::int64_t>(plan_bytes),
            .expected = static_cast<std::int64_t>(extent.end)};
  }
  return {};
}

// `sum`: hash_entry() of all words in front of the codes but the checksum's own.
constexpr Fault checksum_fault(const PlanHeader& h, std::uint64_t sum) {
  return sum == h.checksum ? Fault{} : Fault{.kind = PlanFault::checksum};
}

// A reader's findings about the zones: whether some zone makes no sense, and where they begin and
// end.
struct ZoneLook {
  bool damaged = false;
  std::int32_t first = 0, end = 0;
};
constexpr bool zone_is_damaged(std::int32_t count, std::int32_t offset, std::int32_t next) {
  return count < 0 || std::int64_t{offset} + count > next;
}
constexpr Fault zones_fault(const PlanHeader& h, const ZoneLook& zones) {
  const bool has_zones = !refused(h) && Layout::of(h.layout).has_zones;
  const bool damaged =
      h.recv_rows < 0 || h.recv_rows > capacity_of(h) ||
      (has_zones && (zones.damaged || zones.first != 0 || zones.end != h.recv_rows));
  return damaged ? Fault{.kind = PlanFault::zones} : Fault{};
}

// In the order in which binding_fault() compares.
inline constexpr const char* kBindingNames[] = {
    "rank",    "num_ranks", "num_experts",     "layout",
    "staging", "items",     "overflow policy", "recv_capacity"};

// `slots`: whether plans of low latency are expected.
constexpr Fault kind_fault(const PlanHeader& h, bool slots) {
  return is_ll_layout(h.layout) == slots ? Fault{}
                                         : Fault{.kind = PlanFault::family, .got = h.layout};
}

constexpr Fault binding_fault(const PlanHeader& h, const PlanTerms& t) {
  if (const Fault other = kind_fault(h, is_ll_layout(t.layout))) return other;
  const bool same_ranks_and_experts =
      h.rank == t.rank && h.ranks == t.ranks && h.experts == t.experts;
  if (same_ranks_and_experts &&
      (h.expert_ranks != t.expert_ranks || h.local_experts != t.local_experts)) {
    return {.kind = PlanFault::expert_ranks};
  }
  if (same_ranks_and_experts && h.hosts != t.hosts) return {.kind = PlanFault::hosts};
  const std::int64_t pairs[][2] = {{h.rank, t.rank},
                                   {h.ranks, t.ranks},
                                   {h.experts, t.experts},
                                   {h.layout, t.layout},
                                   {keeps_list(h), t.keeps_list},
                                   {h.keeps_items, t.keeps_items},
                                   {h.overflow, t.overflow},
                                   {h.capacity, t.capacity}};
  static_assert(std::size(pairs) == std::size(kBindingNames));
  std::int32_t which = 0;
  for (const auto& pair : pairs) {
    if (pair[0] != pair[1]) {
      return {.kind = PlanFault::binding, .which = which, .got = pair[0], .expected = pair[1]};
    }
    ++which;
  }
  if (h.capacities != t.capacities) return {.kind = PlanFault::capacities};
  if (h.tokens > t.max_tokens || h.topk > t.max_topk) {
    return {.kind = PlanFault::too_large, .got = h.tokens, .expected = h.topk};
  }
  if (h.alignment > t.alignment) {
    return {.kind = PlanFault::alignment, .got = h.alignment, .expected = t.alignment};
  }
  return {};
}

// `part`: that of a call, 0 = all of it.
constexpr Fault part_fault(const PlanHeader& h, int part) {
  return part <= parts_of(h) ? Fault{}
                             : Fault{.kind = PlanFault::part, .got = part, .expected = parts_of(h)};
}
// The whole is the only part of a plan that has one.
constexpr CallPart call_part(const PlanHeader& h, int part) {
  return {.part = parts_of(h) > 1 ? part : 0, .parts = parts_of(h)};
}

// A condition that a plan sets to a tensor.
struct Check {
  enum Kind : std::int32_t { recv_rows, tokens, topk };
  Kind kind;
  const char* name;
  std::int64_t got;
};
constexpr Fault tensor_fault(const PlanHeader& h, const Check& c) {
  if (c.kind == Check::recv_rows && c.got < h.recv_rows) {
    return {.kind = PlanFault::tensor_rows, .name = c.name, .got = c.got, .expected = h.recv_rows};
  }
  if (c.kind == Check::tokens && c.got != h.tokens) {
    return {.kind = PlanFault::tokens, .name = c.name, .got = c.got, .expected = h.tokens};
  }
  if (c.kind == Check::topk && c.got != h.topk) {
    return {.kind = PlanFault::topk, .name = c.name, .got = c.got, .expected = h.topk};
  }
  return {};
}

// `terms` are those of the group that has found the fault.
std::string text_of(const Fault& fault, const PlanTerms& terms = {});

// Throws INVALID_ARGUMENT with the fault's text, if there is one.
void require_none(const Fault& fault, const PlanTerms& terms = {});

// Throws INVALID_ARGUMENT where a plan cannot be read at all: no memory, or memory that is too
// small or not aligned.
void require_plan_bytes(const void* plan, std::size_t bytes);

}  // namespace xd::ep
