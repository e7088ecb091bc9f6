// Ranks of a communicator, on any host, in the order in which one rank goes through them. Whose
// memory a rank reaches is another question: see comm/hosts.h.
#pragma once

#include <utility>
#include <vector>

namespace xd {

class RankSet {
 public:
  // By ascending rank.
  static RankSet all(int num_ranks) {
    std::vector<int> ranks;
    for (int r = 0; r < num_ranks; ++r) ranks.push_back(r);
    return RankSet(std::move(ranks));
  }

  auto begin() const { return ranks_.begin(); }
  auto end() const { return ranks_.end(); }

 private:
  explicit RankSet(std::vector<int> ranks) : ranks_(std::move(ranks)) {}

  std::vector<int> ranks_;
};

}  // namespace xd
