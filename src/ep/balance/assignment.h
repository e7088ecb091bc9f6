// Which rank holds which experts, while the planner changes it. In which slots they stand is
// decided last.
#pragma once

#include <cstdint>
#include <vector>

#include "base/math.h"
#include "ep/balance/problem.h"

namespace xd::ep {

class Assignment {
 public:
  explicit Assignment(const Problem& problem);

  const Problem& problem() const { return *problem_; }
  bool holds(int rank, int expert) const { return holds_[index(rank, expert)]; }
  const std::vector<int>& experts_of(int rank) const { return experts_[at(rank)]; }
  bool has_room(int rank) const;
  // Whether an expert may go from one rank to another: which does not hold it, and has fewer of its
  // replicas on its host, if that is another one.
  bool may_move(int from, int to, int expert) const;
  std::int64_t load(int rank) const { return load_[at(rank)]; }
  int replicas(int expert) const { return replicas_[at(expert)]; }
  int replicas_on_host_of(int rank, int expert) const { return on_host_[host_index(rank, expert)]; }
  // The load of one replica of an expert that has so many.
  std::int64_t share(int expert, int replicas) const { return loads()[at(expert)] / replicas; }
  std::int64_t share(int expert) const { return share(expert, divisor_[at(expert)]); }

  // Shares follow the replicas that there are, unless expect() has said how many there will be.
  void expect(const std::vector<int>& replicas);
  void count();  // ends that
  void add(int rank, int expert);
  void remove(int rank, int expert);
  // From one rank to another, which does not hold it.
  void move(int from, int to, int expert);

  int busiest() const;  // of equals the lowest rank
  std::int64_t busiest_load() const { return load(busiest()); }
  int doubles() const;
  int moves() const;
  // Gives ranks alike the packs of others of them, so that many experts stay.
  void keep_at_home();
  // [ranks * slots]; an expert that its rank has held keeps its slot.
  std::vector<std::int32_t> table() const;

 private:
  const std::vector<std::int64_t>& loads() const { return problem_->loads; }
  std::size_t index(int rank, int expert) const {
    return at(rank) * at(problem_->experts) + at(expert);
  }
  std::size_t host_index(int rank, int expert) const {
    return at(problem_->hosts[at(rank)]) * at(problem_->experts) + at(expert);
  }
  int common(const std::vector<int>& experts, int rank) const;
  void divide(int expert, int replicas);

  const Problem* problem_;
  std::vector<std::vector<int>> experts_;  // of each rank
  std::vector<bool> holds_;                // [ranks, experts]
  std::vector<std::int64_t> load_;         // [ranks]
  std::vector<int> replicas_, divisor_;    // [experts]
  std::vector<std::uint16_t> on_host_;     // [hosts, experts]
  bool is_expecting_ = false;
};

}  // namespace xd::ep
