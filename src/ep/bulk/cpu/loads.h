// How often tokens of each rank have chosen each logical expert. prepare has the counts of all
// ranks by slot, so every rank adds up the same numbers.
#pragma once

#include <algorithm>
#include <cstdint>
#include <mutex>
#include <vector>

#include "base/math.h"
#include "base/tensor.h"
#include "ep/plan/placement.h"
#include "ep/plan/slot_table.h"

namespace xd::ep::cpu {

class Loads {
 public:
  // Calls visit(vector, size), as Scratch does. Groups without logical experts count nothing.
  template <class Visit>
  void for_each_vector(const CommonConfig& config, Visit&& visit) {
    visit(counts_, at(config.ranks) * at(config.logical_experts));
  }
  // Counts of a plan that was made under this table.
  void add(const CountTable& counts, const SlotTable& table) {
    const std::vector<std::int32_t>& experts = table.experts();
    const std::size_t logical = counts_.size() / at(counts.layout.ranks);
    const std::lock_guard lock(mutex_);
    for (int source = 0; source < counts.layout.ranks; ++source) {
      for (std::size_t slot = 0; slot < experts.size(); ++slot) {
        if (experts[slot] < 0) continue;
        counts_[at(source) * logical + at(experts[slot])] +=
            counts.choices(source, static_cast<int>(slot));
      }
    }
  }
  // Any thread. `out`: int64 [W, logical], or [logical] over all ranks.
  void tell(const Tensor& out, bool clear) {
    auto* const to = out.as<std::int64_t>();
    const auto size = at(out.rows * out.cols);
    const std::lock_guard lock(mutex_);
    std::fill_n(to, size, 0);
    for (std::size_t i = 0; i < counts_.size(); ++i) to[i % size] += counts_[i];
    if (clear) std::ranges::fill(counts_, 0);
  }

 private:
  std::mutex mutex_;
  std::vector<std::int64_t> counts_;  // [W][logical]
};

}  // namespace xd::ep::cpu
