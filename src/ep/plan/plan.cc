#include "ep/plan/plan.h"

#include <cstring>

#include "base/error.h"
#include "base/hash.h"
#include "ep/plan/plan_check.h"

namespace xd::ep {
namespace {

std::uint64_t checksum_of(const std::byte* plan, const PlanExtent& extent) {
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < extent.checked / sizeof(std::uint64_t); ++i) {
    if (i == kChecksumWord) continue;
    std::uint64_t word;
    std::memcpy(&word, plan + i * sizeof(word), sizeof(word));
    sum += hash_entry(i, word);
  }
  return sum;
}

void seal(std::byte* plan, PlanHeader header) {
  const PlanExtent extent = extent_of(header, parts_of(header));
  header.magic = PlanHeader::kMagic;
  header.version = PlanHeader::kVersion | (header.version & PlanHeader::kHasParts);
  header.bytes = extent.end;
  std::memcpy(plan, &header, sizeof(header));
  header.checksum = checksum_of(plan, extent);
  std::memcpy(plan, &header, sizeof(header));
}

PlanHeader read_header(const std::byte* plan) {
  PlanHeader header;
  std::memcpy(&header, plan, sizeof(header));
  return header;
}

}  // namespace

RowCodec::RowCodec(std::span<const std::int64_t> capacities, const Layout& layout,
                   int most_local_experts)
    : base_(1, 0), experts_(static_cast<std::uint32_t>(layout.codes_per_row(most_local_experts))) {
  for (const std::int64_t rows : capacities) {
    base_.push_back(base_.back() + static_cast<std::uint64_t>(rows));
  }
  XD_REQUIRE(base_.back() < kNone / experts_, "config.recv_capacity: ", base_.back(),
             " rows over all ranks", experts_ > 1 ? " (times local experts)" : "",
             " do not fit into 32-bit row numbers, expected less than ", kNone / experts_);
}

PlanHeader open_plan_header(const void* plan, std::size_t bytes) {
  require_plan_bytes(plan, bytes);
  const auto* at = static_cast<const std::byte*>(plan);
  const PlanHeader h = read_header(at);
  require_none(header_fault(h, bytes));
  require_none(checksum_fault(h, checksum_of(at, extent_of(h, parts_of(h)))));
  return h;
}

PlanView PlanView::open(const void* plan, std::size_t bytes) {
  PlanView view;
  view.header_ = open_plan_header(plan, bytes);
  const PlanHeader& h = view.header_;
  require_none(kind_fault(h, false));
  const auto* at = static_cast<const std::byte*>(plan);
  const PlanMap map = map_of(h, parts_of(h));
  view.counts_ = reinterpret_cast<const std::int32_t*>(at + map.count);
  view.offsets_ = reinterpret_cast<const std::int32_t*>(at + map.offset);
  view.part_ends_ = reinterpret_cast<const std::int32_t*>(at + map.part_end);
  view.codes_ = reinterpret_cast<const std::uint32_t*>(at + map.code);
  view.list_ = reinterpret_cast<const std::uint32_t*>(at + map.list);
  const int local = h.local_experts;
  ZoneLook zones{.first = view.offset(0), .end = view.offset(local)};
  for (int e = 0; e < local; ++e) {
    zones.damaged |= zone_is_damaged(view.count(e), view.offset(e), view.offset(e + 1));
  }
  require_none(zones_fault(h, zones));
  return view;
}

void PlanView::require_binding(const PlanBinding& binding) const {
  const PlanTerms terms = terms_of(binding);
  require_none(binding_fault(header_, terms), terms);
}

void seal_plan(std::byte* plan) {
  const PlanHeader header = read_header(plan);
  const PlanMap map = map_of(header, parts_of(header));
  // Zeroes the gaps between the parts, so that equal plans are equal bytes.
  std::memset(plan + map.zones_end, 0, map.code - map.zones_end);
  std::memset(plan + map.list_end, 0, map.end - map.list_end);
  seal(plan, header);
}

void seal_ll_plan(std::byte* plan) {
  const PlanHeader header = read_header(plan);
  const LlPlanMap map = ll_map_of(header);
  std::memset(plan + map.count_end, 0, map.home - map.count_end);
  seal(plan, header);
}

std::size_t plan_size(const Config& config) {
  // Room for every part, whether or not the executor keeps it, and on every rank.
  return PlanMap::make({.local_experts = config.most_local_experts(),
                        .tokens = config.max_tokens,
                        .topk = config.max_topk,
                        .list_rows = config.layout.row_per_expert ? config.capacity : 0,
                        .items = config.pushes_sums() ? config.capacity : 0,
                        .ranks = config.ranks,
                        .parts = config.layout.has_zones
                                     ? std::clamp(config.most_local_experts(), 1, kMaxParts)
                                     : 1})
      .end;
}

std::uint64_t hash_capacities(std::span<const std::int64_t> capacities) {
  return hash_bytes(1, capacities.data(), capacities.size_bytes());
}

}  // namespace xd::ep
