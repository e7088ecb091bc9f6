#include "conformance/tables.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "support/random.h"

namespace xd::test {
namespace {

std::vector<std::int32_t> slots_of(const Table& table, std::int64_t expert) {
  std::vector<std::int32_t> slots;
  for (std::size_t s = 0; s < table.expert_of_slot.size(); ++s) {
    if (table.expert_of_slot[s] == expert) slots.push_back(static_cast<std::int32_t>(s));
  }
  return slots;
}

void shuffle(std::vector<std::int32_t>& numbers, Random& random) {
  for (std::size_t i = numbers.size(); i > 1; --i) {
    std::swap(numbers[i - 1], numbers[random.below(i)]);
  }
}

}  // namespace

std::int64_t Table::slot_of(int source, int token, std::int64_t expert,
                            const std::vector<std::int32_t>& owners) const {
  std::vector<std::int32_t> candidates;
  if (!lists.empty()) {
    candidates = lists[static_cast<std::size_t>(source) * static_cast<std::size_t>(logical) +
                       static_cast<std::size_t>(expert)];
  }
  if (candidates.empty()) {
    candidates = slots_of(*this, expert);
    std::vector<std::int32_t> own = candidates;
    std::erase_if(
        own, [&](std::int32_t slot) { return owners[static_cast<std::size_t>(slot)] != source; });
    if (!own.empty()) candidates = own;
  }
  if (candidates.empty()) return -1;
  const auto hint = static_cast<std::uint64_t>(turn_of(source, token));
  return candidates[(hint + static_cast<std::uint64_t>(source)) % candidates.size()];
}

// Also negative ones.
std::int32_t Table::hint_of(int source, int token) {
  return static_cast<std::int32_t>(static_cast<std::uint32_t>(
      mix(0x417, static_cast<std::uint64_t>(source), static_cast<std::uint64_t>(token))));
}

std::vector<Choices> Table::in_slots(const std::vector<Choices>& ids,
                                     const std::vector<std::int32_t>& owners, bool collapse) const {
  const auto bad = static_cast<std::int64_t>(owners.size());
  std::vector<Choices> slots = ids;
  for (std::size_t source = 0; source < ids.size(); ++source) {
    for (std::size_t i = 0; i < ids[source].ids.size(); ++i) {
      const auto topk = static_cast<std::size_t>(ids[source].topk);
      const std::int64_t id = ids[source].ids[i];
      const auto row = ids[source].ids.begin() + static_cast<std::ptrdiff_t>(i / topk * topk);
      const auto here = ids[source].ids.begin() + static_cast<std::ptrdiff_t>(i);
      std::int64_t& slot = slots[source].ids[i];
      if (id == -1) continue;
      if (id < -1 || id >= logical) {
        slot = bad;
      } else if (std::find(row, here, id) != here) {
        slot = collapse ? -1 : bad;
      } else {
        slot = slot_of(static_cast<int>(source), static_cast<int>(i / topk), id, owners);
      }
    }
  }
  return slots;
}

std::int64_t Table::unplaced(const Choices& ids) const {
  std::int64_t count = 0;
  for (std::size_t i = 0; i < ids.ids.size(); ++i) {
    const auto topk = static_cast<std::size_t>(ids.topk);
    const std::int64_t id = ids.ids[i];
    const auto row = ids.ids.begin() + static_cast<std::ptrdiff_t>(i / topk * topk);
    const auto here = ids.ids.begin() + static_cast<std::ptrdiff_t>(i);
    const bool counts = id >= 0 && id < logical && std::find(row, here, id) == here;
    if (counts && slots_of(*this, id).empty()) ++count;
  }
  return count;
}

int logical_experts(Tables tables, int slots) {
  switch (tables) {
    case Tables::none:
      return 0;
    case Tables::in_order:
    case Tables::permuted:
      return slots;
    case Tables::with_gaps:
      return std::max(1, slots * 5 / 6);
    default:
      return std::max(1, slots * 2 / 3);
  }
}

Table make_table(Tables tables, int num_ranks, int slots, std::uint64_t seed) {
  Random random(seed);
  Table table{num_ranks, logical_experts(tables, slots), {}, {}, random.one_in(2)};
  // Every expert, then any of them.
  table.expert_of_slot.resize(static_cast<std::size_t>(slots));
  for (int s = 0; s < slots; ++s) {
    const auto any = random.below(static_cast<std::uint64_t>(table.logical));
    table.expert_of_slot[static_cast<std::size_t>(s)] =
        s < table.logical ? s : static_cast<std::int32_t>(any);
  }
  if (tables == Tables::in_order) return table;
  shuffle(table.expert_of_slot, random);
  for (std::int32_t& expert : table.expert_of_slot) {
    if (tables == Tables::with_gaps && random.one_in(4)) expert = -1;
  }
  if (tables != Tables::with_lists) return table;
  for (int source = 0; source < num_ranks; ++source) {
    for (int e = 0; e < table.logical; ++e) {
      std::vector<std::int32_t> list = slots_of(table, e);
      shuffle(list, random);
      if (random.one_in(2)) list.push_back(list.front());
      if (random.one_in(3)) list.resize(1);
      if (random.one_in(4)) list.clear();
      table.lists.push_back(std::move(list));
    }
  }
  return table;
}

Given::Given(const Table& table) : expert_of_slot_(table.expert_of_slot) {
  placement_.expert_of_slot = expert_of_slot_.data();
  if (table.lists.empty()) return;
  for (const std::vector<std::int32_t>& list : table.lists) {
    slots_.insert(slots_.end(), list.begin(), list.end());
    first_.push_back(static_cast<std::int32_t>(slots_.size()));
  }
  slots_.push_back(0);  // so that there is an address
  placement_.choice_first = first_.data();
  placement_.choice_slots = slots_.data();
}

}  // namespace xd::test
