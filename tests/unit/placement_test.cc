// The arithmetic from counts to places, against a plain enumeration of all rows.
#include "ep/placement.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <vector>

namespace xd::ep {
namespace {

// One choice of one token; the enumeration below sorts these into receive tensors.
struct Choice {
  int source, token, expert;
};

struct Routing {
  Config config;
  std::vector<std::int32_t> owners;  // of experts by seat, so in ascending order
  std::int64_t alignment = 1;
  std::vector<std::int64_t> capacities;
  std::vector<Choice> choices;
  std::vector<std::uint32_t> table;

  CountTable counts() const { return {{config.experts, config.ranks}, table}; }
  std::int64_t owner(int expert) const { return owners[static_cast<std::size_t>(expert)]; }
  Config config_of(int rank) const {
    Config c = config;
    c.local_experts = static_cast<int>(std::ranges::count(owners, rank));
    return c;
  }
  // The rows that a rank can receive: its capacity in whole multiples of the alignment.
  std::int64_t capacity(std::size_t rank) const { return capacities[rank] / alignment * alignment; }
};

Routing random_routing(std::mt19937& random, xd_ep_layout layout, xd_ep_overflow overflow) {
  const auto pick = [&](int low, int high) {
    return std::uniform_int_distribution<int>(low, high)(random);
  };
  Routing r;
  r.config.ranks = pick(1, 5);
  r.config.experts = pick(1, 20);
  for (int e = 0; e < r.config.experts; ++e) r.owners.push_back(pick(0, r.config.ranks - 1));
  r.config.expert_tables =
      ExpertTables::read(r.owners.data(), r.config.experts, r.config.ranks, "");
  std::ranges::sort(r.owners);
  r.alignment = 1 << pick(0, 3);
  r.config.layout = Layout::of(layout);
  r.config.overflow = overflow;
  const CountLayout counts{r.config.experts, r.config.ranks};
  r.table.assign(counts.size() * static_cast<std::size_t>(r.config.ranks), 0);
  for (int s = 0; s < r.config.ranks; ++s) {
    std::uint32_t* row = r.table.data() + static_cast<std::size_t>(s) * counts.size();
    row[counts.bad_ids()] = static_cast<std::uint32_t>(pick(0, 4) == 0 ? pick(1, 3) : 0);
    for (int t = 0, tokens = pick(0, 12); t < tokens; ++t) {
      std::vector<bool> to_rank(static_cast<std::size_t>(r.config.ranks));
      for (int e = 0; e < r.config.experts; ++e) {
        if (pick(0, 2) != 0) continue;
        r.choices.push_back({s, t, e});
        ++row[counts.expert(e)];
        to_rank[static_cast<std::size_t>(r.owner(e))] = true;
      }
      for (int d = 0; d < r.config.ranks; ++d)
        row[counts.rank(d)] += to_rank[static_cast<std::size_t>(d)];
    }
    r.capacities.push_back(r.alignment * pick(0, 20) + pick(0, 7));
  }
  return r;
}

// EXPERT_MAJOR, row by row: the first row of every (source, expert), and the owner of each row.
struct Enumeration {
  std::vector<std::vector<std::int64_t>> first;  // [source][expert]
  std::vector<std::int64_t> total;               // [rank]
  std::vector<std::vector<std::int64_t>> rank_rows;
};

Enumeration enumerate_zones(const Routing& r) {
  const auto ranks = static_cast<std::size_t>(r.config.ranks);
  Enumeration result{
      .first =
          std::vector(ranks, std::vector<std::int64_t>(static_cast<std::size_t>(r.config.experts))),
      .total = std::vector<std::int64_t>(ranks),
      .rank_rows = std::vector(ranks, std::vector<std::int64_t>(ranks))};
  const bool drop = r.config.overflow == XD_EP_OVERFLOW_DROP;
  for (std::size_t d = 0; d < ranks; ++d) {
    std::int64_t row = 0;
    for (int expert = 0; expert < r.config.experts; ++expert) {
      if (r.owner(expert) != static_cast<std::int64_t>(d)) continue;
      for (std::size_t s = 0; s < ranks; ++s) {
        result.first[s][static_cast<std::size_t>(expert)] = row;
        for (const Choice& c : r.choices) {
          if (c.source != static_cast<int>(s) || c.expert != expert) continue;
          if (!drop || row < r.capacity(d)) ++result.rank_rows[s][d];
          ++row;
        }
      }
      while (row % r.alignment != 0) ++row;
    }
    result.total[d] = row;
  }
  return result;
}

class PlacementTest : public testing::TestWithParam<xd_ep_overflow> {};

TEST_P(PlacementTest, ExpertMajorMatchesARowByRowEnumeration) {
  for (unsigned seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Routing r = random_routing(random, XD_EP_EXPERT_MAJOR, GetParam());
    const Enumeration expected = enumerate_zones(r);
    for (int self = 0; self < r.config.ranks; ++self) {
      Placement p;
      p.reserve(r.config_of(self));
      p.place(r.counts(), r.config_of(self), r.capacities, {self, r.alignment});
      const auto me = static_cast<std::size_t>(self);
      EXPECT_EQ(p.first_row, expected.first[me]);
      EXPECT_EQ(p.total, expected.total);
      EXPECT_EQ(p.recv_rows, std::min(expected.total[me], r.capacity(me)));
      std::int64_t received = 0, counted = 0;
      for (std::size_t s = 0; s < expected.first.size(); ++s) {
        for (std::size_t d = 0; d < expected.first.size(); ++d) {
          EXPECT_EQ(p.rank_rows[s * expected.first.size() + d], expected.rank_rows[s][d]);
        }
        received += expected.rank_rows[s][me];
      }
      for (const std::int64_t count : p.count) counted += count;
      EXPECT_EQ(counted, received);
    }
  }
}

TEST_P(PlacementTest, AllRanksNameTheLowestRankThatOverflowsOrHasBadIds) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    const Routing r = random_routing(random, XD_EP_EXPERT_MAJOR, GetParam());
    const Enumeration expected = enumerate_zones(r);
    int overflow = -1, bad = -1;
    std::int64_t bad_ids = 0;
    for (int d = r.config.ranks - 1; d >= 0; --d) {
      const auto i = static_cast<std::size_t>(d);
      if (expected.total[i] > r.capacity(i)) overflow = d;
      if (r.counts().bad_ids(d) > 0) bad = d;
      bad_ids += r.counts().bad_ids(d);
    }
    for (int self = 0; self < r.config.ranks; ++self) {
      Placement p;
      p.reserve(r.config_of(self));
      p.place(r.counts(), r.config_of(self), r.capacities, {self, r.alignment});
      EXPECT_EQ(p.overflow_rank, overflow);
      EXPECT_EQ(p.bad_id_rank, bad);
      EXPECT_EQ(p.bad_ids, bad_ids);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Policies, PlacementTest,
                         testing::Values(XD_EP_OVERFLOW_ERROR, XD_EP_OVERFLOW_DROP));

// Two ranks with two experts each, alignment 4. Rank 0 receives 3 + 1 rows for expert 0 (padded to
// 4) and 2 for expert 1 (padded to 4).
Routing small_routing(xd_ep_overflow overflow, std::int64_t capacity) {
  Routing r;
  r.config.ranks = 2;
  r.config.local_experts = 2;
  r.config.experts = 4;
  r.config.expert_tables = ExpertTables::even(4, 2);
  r.alignment = 4;
  r.config.overflow = overflow;
  //            experts   rows to ranks, tokens, bad ids
  r.table = {3, 0, 0, 1, 3, 1, 3, 0,   // rank 0
             1, 2, 0, 0, 2, 0, 2, 0};  // rank 1
  r.capacities = {capacity, 8};
  return r;
}

TEST(PlacementTest, DropCutsTheLastZoneAtTheCapacity) {
  const Routing r = small_routing(XD_EP_OVERFLOW_DROP, 7);
  Placement p;
  p.reserve(r.config);
  p.place(r.counts(), r.config, r.capacities, {0, r.alignment});
  EXPECT_EQ(p.count, (std::vector<std::int64_t>{4, 0}));
  EXPECT_EQ(p.offset, (std::vector<std::int64_t>{0, 4, 4}));
  EXPECT_EQ(p.total[0], 8);
  EXPECT_EQ(p.recv_rows, 4);
  EXPECT_EQ(p.dropped_rows, 2);
  EXPECT_EQ(p.rank_rows, (std::vector<std::int64_t>{3, 1, 1, 0}));
}

TEST(PlacementTest, ErrorPolicyReportsWholeZones) {
  const Routing r = small_routing(XD_EP_OVERFLOW_ERROR, 4);
  Placement p;
  p.reserve(r.config);
  p.place(r.counts(), r.config, r.capacities, {0, r.alignment});
  EXPECT_EQ(p.count, (std::vector<std::int64_t>{4, 2}));
  EXPECT_EQ(p.offset, (std::vector<std::int64_t>{0, 4, 8}));
  EXPECT_EQ(p.overflow_rank, 0);
}

TEST(PlacementTest, RankMajorRowsFollowTheSources) {
  Routing r = small_routing(XD_EP_OVERFLOW_DROP, 4);
  r.config.layout = Layout::of(XD_EP_RANK_MAJOR);
  Placement p;
  p.reserve(r.config);
  p.place(r.counts(), r.config, r.capacities, {1, r.alignment});
  EXPECT_EQ(p.first_row, (std::vector<std::int64_t>{3, 1}));  // behind rank 0's rows
  EXPECT_EQ(p.total, (std::vector<std::int64_t>{5, 1}));
  EXPECT_EQ(p.overflow_rank, 0);
  EXPECT_EQ(p.rank_rows, (std::vector<std::int64_t>{3, 1, 1, 0}));
  EXPECT_EQ(p.count, (std::vector<std::int64_t>{0, 1}));
  EXPECT_EQ(p.offset, (std::vector<std::int64_t>{0, 0, 4}));
}

}  // namespace
}  // namespace xd::ep
