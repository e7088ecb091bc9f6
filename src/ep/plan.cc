#include "ep/plan.h"

#include <cstring>

#include "base/error.h"
#include "base/hash.h"

namespace xd::ep {
namespace {

std::uint64_t checksum_of(const std::byte* plan, const PlanMap& map) {
  constexpr std::uint64_t kChecksumWord = offsetof(PlanHeader, checksum) / sizeof(std::uint64_t);
  std::uint64_t sum = 0;
  for (std::uint64_t i = 0; i < map.code / sizeof(std::uint64_t); ++i) {
    if (i == kChecksumWord) continue;
    std::uint64_t word;
    std::memcpy(&word, plan + i * sizeof(word), sizeof(word));
    sum += hash_entry(i, word);
  }
  return sum;
}

}  // namespace

bool PlanView::zones_fit() const {
  const PlanHeader& h = header_;
  if (h.recv_rows < 0 || h.recv_rows > capacity_of(h)) return false;
  if (refused() || h.layout != XD_EP_EXPERT_MAJOR) return true;
  std::int32_t end = 0;
  for (int e = 0; e < h.experts / h.ranks; ++e) {
    if (offsets_[e] != end || counts_[e] < 0) return false;
    end = offsets_[e + 1];
    if (std::int64_t{offsets_[e]} + counts_[e] > end) return false;
  }
  return end == h.recv_rows;
}

RowCodec::RowCodec(std::span<const std::int64_t> capacities, xd_ep_layout layout, int local_experts)
    : base_(1, 0),
      experts_(layout == XD_EP_RANK_MAJOR ? static_cast<std::uint32_t>(local_experts) : 1) {
  for (const std::int64_t rows : capacities) {
    base_.push_back(base_.back() + static_cast<std::uint64_t>(rows));
  }
  XD_REQUIRE(base_.back() < kNone / experts_, "config.recv_capacity: ", base_.back(),
             " rows over all ranks", experts_ > 1 ? " (times local experts)" : "",
             " do not fit into 32-bit row numbers, expected less than ", kNone / experts_);
}

PlanView PlanView::open(const void* plan, std::size_t bytes) {
  XD_REQUIRE(plan != nullptr, "plan = NULL");
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(plan) % 16 == 0, "plan is not 16-byte aligned");
  XD_REQUIRE(bytes >= sizeof(PlanHeader), "plan_bytes = ", bytes, ", expected at least ",
             sizeof(PlanHeader), ": the plan is cut short");
  const auto* at = static_cast<const std::byte*>(plan);
  PlanView view;
  std::memcpy(&view.header_, at, sizeof(PlanHeader));
  const PlanHeader& h = view.header_;
  XD_REQUIRE(h.magic == PlanHeader::kMagic,
             "plan: these bytes are no plan (or were never prepared)");
  XD_REQUIRE(h.version == PlanHeader::kVersion, "plan has format version ", h.version,
             ", expected ", PlanHeader::kVersion);
  XD_REQUIRE(plausible(h), "plan: its header is damaged");
  const PlanMap map = map_of(h);
  XD_REQUIRE(h.bytes == map.end, "plan: its header is damaged");
  XD_REQUIRE(bytes >= map.end, "plan_bytes = ", bytes, ", expected at least ", map.end,
             ": the plan is cut short");
  XD_REQUIRE(h.checksum == checksum_of(at, map), "plan: its header is damaged (checksum)");
  view.counts_ = reinterpret_cast<const std::int32_t*>(at + map.count);
  view.offsets_ = reinterpret_cast<const std::int32_t*>(at + map.offset);
  view.codes_ = reinterpret_cast<const std::uint32_t*>(at + map.code);
  view.list_ = reinterpret_cast<const std::uint32_t*>(at + map.list);
  XD_REQUIRE(view.zones_fit(), "plan: its zones are damaged");
  return view;
}

void PlanView::require_binding(const PlanBinding& binding) const {
  const Config& c = *binding.config;
  const auto require = [](const char* what, std::int64_t plan, std::int64_t group) {
    XD_REQUIRE(plan == group, "plan: made for ", what, " = ", plan, ", used with ", what, " = ",
               group);
  };
  require("rank", header_.rank, binding.rank);
  require("num_ranks", header_.ranks, c.ranks);
  require("num_experts", header_.experts, c.experts);
  require("layout", header_.layout, c.layout);
  require("staging", header_.keeps_list, c.keeps_lists() ? 1 : 0);
  require("items", header_.keeps_items, c.keeps_items() ? 1 : 0);
  require("overflow policy", header_.overflow, c.overflow);
  require("recv_capacity", header_.capacity, c.capacity);
  XD_REQUIRE(header_.capacities == binding.capacities,
             "plan: made for other receive capacities of the peers than this group's");
  XD_REQUIRE(header_.tokens <= c.max_tokens && header_.topk <= c.max_topk, "plan: made for ",
             header_.tokens, " tokens and top-", header_.topk, ", the group's bounds are ",
             c.max_tokens, " and ", c.max_topk);
  XD_REQUIRE(header_.alignment <= c.alignment, "plan: made for alignment = ", header_.alignment,
             ", the group's bound is ", c.alignment);
}

void seal_plan(std::byte* plan) {
  PlanHeader header;
  std::memcpy(&header, plan, sizeof(header));
  const PlanMap map = map_of(header);
  header.magic = PlanHeader::kMagic;
  header.version = PlanHeader::kVersion;
  header.bytes = map.end;
  // Gaps between the parts, so that equal plans are equal bytes.
  std::memset(plan + map.zones_end, 0, map.code - map.zones_end);
  std::memset(plan + map.list_end, 0, map.end - map.list_end);
  std::memcpy(plan, &header, sizeof(header));
  header.checksum = checksum_of(plan, map);
  std::memcpy(plan, &header, sizeof(header));
}

std::size_t plan_size(const Config& config) {
  // As large as any executor's.
  return PlanMap::make({.local_experts = config.local_experts,
                        .tokens = config.max_tokens,
                        .topk = config.max_topk,
                        .list_rows = config.expert_major() ? config.capacity : 0,
                        .items = config.expert_major() || config.staging ? config.capacity : 0,
                        .ranks = config.ranks})
      .end;
}

std::uint64_t hash_capacities(std::span<const std::int64_t> capacities) {
  return hash_bytes(1, capacities.data(), capacities.size_bytes());
}

}  // namespace xd::ep
