#include "comm/join/catalogue.h"

#include <utility>

#include "base/math.h"

namespace xd {

void Catalogue::list(int number, Group group) {
  const std::lock_guard lock(mutex_);
  groups_.insert_or_assign(number, std::move(group));
}

void Catalogue::unlist(int number) {
  const std::lock_guard lock(mutex_);
  groups_.erase(number);
}

std::optional<AdoptedGroup> Catalogue::next(int number, const std::string& call) const {
  const std::lock_guard lock(mutex_);
  for (auto at = groups_.upper_bound(number); at != groups_.end(); ++at) {
    if (at->second.call == call) return AdoptedGroup{at->first, at->second.terms, {}};
  }
  return {};
}

std::shared_ptr<Segment> Catalogue::memory(int number, int rank) const {
  const std::lock_guard lock(mutex_);
  const auto group = groups_.find(number);
  if (group == groups_.end() || rank < 0 || at(rank) >= group->second.memory.size()) return nullptr;
  return group->second.memory[at(rank)];
}

void Catalogue::mask(NearRank rank) const {
  const std::lock_guard lock(mutex_);
  for (const auto& [number, group] : groups_) group.mask(rank);
}

}  // namespace xd
