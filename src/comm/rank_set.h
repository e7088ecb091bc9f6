// Some of a communicator's ranks, in the order in which one rank goes through them. Loops that
// touch other ranks' memory, or wait for other ranks, take a set, and so reach exactly its ranks.
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
  // All but `rank`. The next rank comes first, so that not all ranks begin with the same peer.
  static RankSet peers_of(int rank, int num_ranks) {
    std::vector<int> ranks;
    for (int i = 1; i < num_ranks; ++i) ranks.push_back((rank + i) % num_ranks);
    return RankSet(std::move(ranks));
  }

  auto begin() const { return ranks_.begin(); }
  auto end() const { return ranks_.end(); }

 private:
  explicit RankSet(std::vector<int> ranks) : ranks_(std::move(ranks)) {}

  std::vector<int> ranks_;
};

}  // namespace xd
