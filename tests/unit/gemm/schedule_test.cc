// The order of rows and products in an all_gather on CUDA.
#include "gemm/cuda/schedule.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <vector>

#include "base/math.h"

namespace xd::gemm::cuda {
namespace {

constexpr Option kSingle{.algo = XD_GEMM_ALGO_SPLIT};
constexpr Option kDoubling{.algo = XD_GEMM_ALGO_SPLIT, .doubles = true};
constexpr Option kWhole{.algo = XD_GEMM_ALGO_SEQUENTIAL};

std::vector<int> sources_of(const GatherSchedule& schedule) {
  std::vector<int> sources;
  for (int i = 0; i < schedule.steps; ++i) {
    const Sources& step = schedule.step[static_cast<std::size_t>(i)];
    for (int s = 0; s < step.count; ++s) sources.push_back(step.first + s);
  }
  return sources;
}

TEST(GemmSchedule, EveryPeerIsSentToAndTakenOnce) {
  for (const Option& option : {kSingle, kDoubling, kWhole}) {
    for (int ranks = 1; ranks <= 72; ++ranks) {
      for (int rank = 0; rank < ranks; ++rank) {
        const GatherSchedule schedule = gather_schedule(option, rank, ranks);
        std::vector<int> sent(static_cast<std::size_t>(ranks)), taken = sent;
        for (int i = 0; i < schedule.sends; ++i) ++sent.at(at(schedule.to[at(i)]));
        for (const int source : sources_of(schedule)) ++taken.at(at(source));
        for (int r = 0; r < ranks; ++r) {
          EXPECT_EQ(sent[at(r)], r == rank ? 0 : 1) << "algo " << option.algo << ", rank " << rank;
          EXPECT_EQ(taken[at(r)], r == rank ? 0 : 1) << "algo " << option.algo << ", rank " << rank;
        }
      }
    }
  }
}

// If all ranks send at the same pace, then the rows of a step have come when it has its turn: the
// last of them arrives as early as any order allows.
TEST(GemmSchedule, RowsComeInTheOrderInWhichProductsTakeThem) {
  for (const Option& option : {kSingle, kDoubling}) {
    for (const int ranks : {2, 3, 4, 5, 6, 7, 8, 16}) {
      for (int rank = 0; rank < ranks; ++rank) {
        std::vector<int> arrival(static_cast<std::size_t>(ranks), -1);
        for (int peer = 0; peer < ranks; ++peer) {
          const GatherSchedule theirs = gather_schedule(option, peer, ranks);
          for (int i = 0; i < theirs.sends; ++i) {
            if (theirs.to[at(i)] == rank) arrival[at(peer)] = i;
          }
        }
        const GatherSchedule mine = gather_schedule(option, rank, ranks);
        int taken = 0, latest = -1;
        for (int i = 0; i < mine.steps; ++i) {
          for (int s = 0; s < mine.step[at(i)].count; ++s) {
            latest = std::max(latest, arrival[at(mine.step[at(i)].first + s)]);
            ++taken;
          }
          // A block that wraps around is two steps; the first of them may need what comes last.
          const bool around = option.doubles && !std::has_single_bit(unsigned(ranks));
          if (around && i + 1 < mine.steps && mine.step[at(i + 1)].first == 0) continue;
          EXPECT_EQ(latest, taken - 1) << "rank " << rank << " of " << ranks;
        }
      }
    }
  }
}

TEST(GemmSchedule, DoublingStepsTakeAsManyPeersAsThereAreRowsOf) {
  const GatherSchedule schedule = gather_schedule(kDoubling, 5, 8);
  ASSERT_EQ(schedule.steps, 3);
  EXPECT_EQ(schedule.step[0].first, 4);
  EXPECT_EQ(schedule.step[0].count, 1);
  EXPECT_EQ(schedule.step[1].first, 6);
  EXPECT_EQ(schedule.step[1].count, 2);
  EXPECT_EQ(schedule.step[2].first, 0);
  EXPECT_EQ(schedule.step[2].count, 4);
}

}  // namespace
}  // namespace xd::gemm::cuda
