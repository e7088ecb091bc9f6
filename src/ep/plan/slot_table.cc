#include "ep/plan/slot_table.h"

#include <array>
#include <numeric>
#include <span>

#include "base/error.h"
#include "base/hash.h"
#include "base/math.h"
#include "base/options.h"

namespace xd::ep {

// Checks a caller's table, and takes out of it what one rank needs.
class SlotTable::Reader {
 public:
  Reader(const xd_ep_placement& user, const CommonConfig& config, int rank)
      : config_(config), rank_(rank), of_slot_(user.expert_of_slot, at(config.experts)) {
    check_slots();
    if (user.choice_first == nullptr) return;
    firsts_ = std::span(user.choice_first, at(config.ranks) * at(config.logical_experts) + 1);
    check_firsts();
    listed_ = std::span(user.choice_slots, at(firsts_.back()));
    check_lists();
  }

  SlotTable take() const {
    SlotTable table;
    table.rank_ = at(rank_);
    table.experts_.resize(of_slot_.size());
    for (std::size_t s = 0; s < of_slot_.size(); ++s) table.experts_[physical(s)] = of_slot_[s];
    table.first_.push_back(0);
    const auto slots = slots_by_expert();
    for (int e = 0; e < config_.logical_experts; ++e) {
      for (const std::int32_t slot : candidates(e, slots[at(e)])) {
        table.slots_.push_back(static_cast<std::uint32_t>(physical(at(slot))));
      }
      table.first_.push_back(static_cast<std::uint32_t>(table.slots_.size()));
    }
    table.hash_ = hash_bytes(1, of_slot_.data(), of_slot_.size_bytes());
    table.hash_ = hash_bytes(table.hash_, firsts_.data(), firsts_.size_bytes());
    table.hash_ = hash_bytes(table.hash_, listed_.data(), listed_.size_bytes());
    return table;
  }

 private:
  void check_slots() const {
    for (std::size_t s = 0; s < of_slot_.size(); ++s) {
      XD_REQUIRE(of_slot_[s] >= -1 && of_slot_[s] < config_.logical_experts,
                 "placement.expert_of_slot[", s, "] = ", of_slot_[s],
                 ", expected a logical expert, 0 to ", config_.logical_experts - 1,
                 ", or -1 = empty");
    }
  }
  void check_firsts() const {
    XD_REQUIRE(firsts_[0] == 0, "placement.choice_first[0] = ", firsts_[0], ", expected 0");
    for (std::size_t i = 1; i < firsts_.size(); ++i) {
      XD_REQUIRE(firsts_[i] >= firsts_[i - 1], "placement.choice_first[", i, "] = ", firsts_[i],
                 ", expected at least the ", firsts_[i - 1], " before it");
    }
  }
  void check_lists() const {
    for (std::size_t i = 0; i + 1 < firsts_.size(); ++i) {
      const auto expert = static_cast<std::int32_t>(i % at(config_.logical_experts));
      for (std::size_t c = at(firsts_[i]); c < at(firsts_[i + 1]); ++c) {
        const std::int32_t slot = listed_[c];
        XD_REQUIRE(slot >= 0 && slot < config_.experts, "placement.choice_slots[", c, "] = ", slot,
                   ", expected a slot, 0 to ", config_.experts - 1);
        XD_REQUIRE(of_slot_[at(slot)] == expert, "placement.choice_slots[", c, "] = ", slot,
                   ", a slot of expert ", of_slot_[at(slot)], ", expected one of expert ", expert);
      }
    }
  }

  std::size_t physical(std::size_t slot) const {
    return at(config_.map().physical_expert_of(static_cast<int>(slot)));
  }
  std::vector<std::vector<std::int32_t>> slots_by_expert() const {
    std::vector<std::vector<std::int32_t>> slots(at(config_.logical_experts));
    for (std::size_t s = 0; s < of_slot_.size(); ++s) {
      if (of_slot_[s] >= 0) slots[at(of_slot_[s])].push_back(static_cast<std::int32_t>(s));
    }
    return slots;
  }
  // The list of slots that this rank's tokens take in turn.
  std::vector<std::int32_t> candidates(int expert, const std::vector<std::int32_t>& all) const {
    if (!firsts_.empty()) {
      const std::size_t i = at(rank_) * at(config_.logical_experts) + at(expert);
      const auto list = listed_.subspan(at(firsts_[i]), at(firsts_[i + 1] - firsts_[i]));
      if (!list.empty()) return {list.begin(), list.end()};
    }
    std::vector<std::int32_t> own;
    for (const std::int32_t slot : all) {
      if (config_.map().rank_of(slot) == rank_) own.push_back(slot);
    }
    return own.empty() ? all : own;
  }

  const CommonConfig& config_;
  const int rank_;
  const std::span<const std::int32_t> of_slot_;
  std::span<const std::int32_t> firsts_, listed_;  // empty = there are no lists
};

SlotTable SlotTable::first(const CommonConfig& config, int rank) {
  if (config.logical_experts == 0) return {};
  std::vector<std::int32_t> expert_of_slot(at(config.experts), -1);
  std::iota(expert_of_slot.begin(), expert_of_slot.begin() + config.logical_experts, 0);
  xd_ep_placement placement = XD_EP_PLACEMENT_INIT;
  placement.expert_of_slot = expert_of_slot.data();
  return Reader(placement, config, rank).take();
}

SlotTable SlotTable::read(const xd_ep_placement* user, const CommonConfig& config, int rank) {
  const xd_ep_placement read = read_struct("placement", user, xd_ep_placement XD_EP_PLACEMENT_INIT);
  XD_REQUIRE(read.expert_of_slot != nullptr,
             "placement.expert_of_slot = NULL, expected the expert of each slot");
  XD_REQUIRE((read.choice_first == nullptr) == (read.choice_slots == nullptr),
             "placement.choice_first and choice_slots: one is NULL, expected both or none");
  return Reader(read, config, rank).take();
}

Tensor read_replica_hint(const DLTensor* hint, std::int64_t tokens, const CommonConfig& config,
                         DLDevice device) {
  XD_REQUIRE(hint == nullptr || config.logical_experts > 0,
             "replica_hint: given, expected NULL: the group was made with num_logical_experts = 0");
  constexpr std::array kTypes = {DType::i32, DType::i64};
  const Tensor read = read_tensor(
      hint,
      {.name = "replica_hint", .ndim = 1, .types = kTypes, .device = device, .optional = true});
  if (read) require_rows(read, tokens, "rows of topk_idx");
  return read;
}

}  // namespace xd::ep
