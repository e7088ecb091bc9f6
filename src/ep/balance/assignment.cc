#include "ep/balance/assignment.h"

#include <algorithm>
#include <utility>

namespace xd::ep {

Assignment::Assignment(const Problem& problem)
    : problem_(&problem),
      experts_(at(problem.ranks)),
      holds_(at(problem.ranks) * at(problem.experts)),
      load_(at(problem.ranks)),
      replicas_(at(problem.experts)),
      divisor_(at(problem.experts), 1),
      on_host_(at(problem.ranks) * at(problem.experts)) {}

bool Assignment::has_room(int rank) const {
  return static_cast<int>(experts_of(rank).size()) < problem_->room[at(rank)];
}

bool Assignment::may_move(int from, int to, int expert) const {
  if (holds(to, expert)) return false;
  return problem_->hosts[at(from)] == problem_->hosts[at(to)] ||
         replicas_on_host_of(to, expert) < replicas_on_host_of(from, expert);
}

void Assignment::divide(int expert, int replicas) {
  const std::int64_t change = share(expert, replicas) - share(expert);
  divisor_[at(expert)] = replicas;
  if (change == 0) return;
  for (int r = 0; r < problem_->ranks; ++r) {
    if (holds(r, expert)) load_[at(r)] += change * std::ranges::count(experts_of(r), expert);
  }
}

void Assignment::expect(const std::vector<int>& replicas) {
  is_expecting_ = true;
  for (int e = 0; e < problem_->experts; ++e) divide(e, replicas[at(e)]);
}

void Assignment::count() {
  is_expecting_ = false;
  for (int e = 0; e < problem_->experts; ++e) divide(e, std::max(replicas(e), 1));
}

void Assignment::add(int rank, int expert) {
  experts_[at(rank)].push_back(expert);
  holds_[index(rank, expert)] = true;
  load_[at(rank)] += share(expert);
  ++replicas_[at(expert)];
  ++on_host_[host_index(rank, expert)];
  if (!is_expecting_) divide(expert, replicas(expert));
}

void Assignment::remove(int rank, int expert) {
  auto& experts = experts_[at(rank)];
  experts.erase(std::ranges::find(experts, expert));
  holds_[index(rank, expert)] = std::ranges::find(experts, expert) != experts.end();
  load_[at(rank)] -= share(expert);
  --replicas_[at(expert)];
  --on_host_[host_index(rank, expert)];
  if (!is_expecting_) divide(expert, std::max(replicas(expert), 1));
}

void Assignment::move(int from, int to, int expert) {
  auto& experts = experts_[at(from)];
  experts.erase(std::ranges::find(experts, expert));
  experts_[at(to)].push_back(expert);
  holds_[index(from, expert)] = std::ranges::find(experts, expert) != experts.end();
  holds_[index(to, expert)] = true;
  load_[at(from)] -= share(expert);
  load_[at(to)] += share(expert);
  --on_host_[host_index(from, expert)];
  ++on_host_[host_index(to, expert)];
}

int Assignment::busiest() const {
  return static_cast<int>(std::ranges::max_element(load_) - load_.begin());
}

int Assignment::doubles() const {
  int found = 0;
  for (std::vector<int> experts : experts_) {
    std::ranges::sort(experts);
    const auto again = std::ranges::unique(experts);
    found += static_cast<int>(again.size());
  }
  return found;
}

int Assignment::moves() const {
  int found = 0;
  for (int r = 0; r < problem_->ranks && problem_->has_current(); ++r) {
    const int stay = common(experts_of(r), r);
    found += static_cast<int>(experts_of(r).size()) - stay;
  }
  return found;
}

int Assignment::common(const std::vector<int>& experts, int rank) const {
  return static_cast<int>(
      std::ranges::count_if(experts, [&](int e) { return problem_->held_before(rank, e); }));
}

void Assignment::keep_at_home() {
  if (!problem_->has_current()) return;
  const Problem& p = *problem_;
  std::vector<bool> is_taken(at(p.ranks));
  std::vector<int> home(at(p.ranks));
  for (int pack = 0; pack < p.ranks; ++pack) {
    int best = -1, most = -1;
    for (int r = 0; r < p.ranks; ++r) {
      const bool alike = p.room[at(r)] == p.room[at(pack)] && p.hosts[at(r)] == p.hosts[at(pack)];
      if (is_taken[at(r)] || !alike) continue;
      const int stay = common(experts_of(pack), r);
      if (stay > most) best = r, most = stay;
    }
    is_taken[at(best)] = true;
    home[at(pack)] = best;
  }
  // Hosts hold what they held, so replicas on hosts are the same.
  const auto packs = std::exchange(experts_, std::vector<std::vector<int>>(at(p.ranks)));
  const auto loads = load_;
  std::fill(holds_.begin(), holds_.end(), false);
  for (int pack = 0; pack < p.ranks; ++pack) {
    const int rank = home[at(pack)];
    experts_[at(rank)] = packs[at(pack)];
    load_[at(rank)] = loads[at(pack)];
    for (const int e : packs[at(pack)]) holds_[index(rank, e)] = true;
  }
}

std::vector<std::int32_t> Assignment::table() const {
  const Problem& p = *problem_;
  std::vector<std::int32_t> table(at(p.ranks) * at(p.slots), kEmpty);
  for (int r = 0; r < p.ranks; ++r) {
    std::vector<int> left = experts_of(r);
    std::ranges::sort(left);
    const int first = r * p.slots, end = first + p.room[at(r)];
    for (int s = first; p.has_current() && s < end; ++s) {
      const auto found = std::ranges::find(left, p.current[at(s)]);
      if (found == left.end()) continue;
      table[at(s)] = *found;
      left.erase(found);
    }
    auto next = left.begin();
    for (int s = first; s < end && next != left.end(); ++s) {
      if (table[at(s)] == kEmpty) table[at(s)] = *next++;
    }
  }
  return table;
}

}  // namespace xd::ep
