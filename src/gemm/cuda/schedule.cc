#include "gemm/cuda/schedule.h"

#include <algorithm>
#include <bit>
#include <cstddef>

namespace xd::gemm::cuda {
namespace {

class Builder {
 public:
  Builder(int rank, int ranks) : rank_(rank), ranks_(ranks) {}

  void send(int peer) { made_.to[static_cast<std::size_t>(made_.sends++)] = peer; }
  // Ranks first, first + 1, .. modulo the number of ranks: cut where they wrap around.
  void take(int first, int count) {
    const int before_end = std::min(count, ranks_ - first);
    add({first, before_end});
    if (count > before_end) add({0, count - before_end});
  }
  GatherSchedule done() const { return made_; }

  int rank() const { return rank_; }
  int ranks() const { return ranks_; }
  int wrap(int rank) const { return (rank + 2 * ranks_) % ranks_; }

 private:
  void add(Sources sources) { made_.step[static_cast<std::size_t>(made_.steps++)] = sources; }

  const int rank_, ranks_;
  GatherSchedule made_;
};

// `width`: peers of the first step.
void ring(Builder& b, int width, bool doubling) {
  for (int d = 1; d < b.ranks(); ++d) b.send(b.wrap(b.rank() + d));
  for (int done = 0; done < b.ranks() - 1; width *= doubling ? 2 : 1) {
    const int count = std::min(width, b.ranks() - 1 - done);
    done += count;
    b.take(b.wrap(b.rank() - done), count);
  }
}

// Step i takes the rows of the block of 2^i ranks beside this rank's own. Rank r sends to r ^ 1,
// r ^ 2, r ^ 3 .., so in that order rows come.
void blocks(Builder& b) {
  for (int d = 1; d < b.ranks(); ++d) b.send(b.rank() ^ d);
  for (int width = 1; width < b.ranks(); width *= 2) {
    b.take((b.rank() / width * width) ^ width, width);
  }
}

}  // namespace

GatherSchedule gather_schedule(const Option& option, int rank, int ranks) {
  Builder builder(rank, ranks);
  if (option.doubles && std::has_single_bit(static_cast<unsigned>(ranks))) {
    blocks(builder);
  } else {
    ring(builder, option.algo == XD_GEMM_ALGO_SPLIT ? 1 : ranks, option.doubles);
  }
  return builder.done();
}

}  // namespace xd::gemm::cuda
