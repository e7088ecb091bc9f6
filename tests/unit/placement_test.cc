// The planner of placements. Loads of random cases add up to a power of two, so that the planner's
// scale is exact and the plain methods here meet the same ties.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/math.h"
#include "ep/balance/planner.h"

namespace xd::ep {
namespace {

using Ints = std::vector<std::int32_t>;
using Loads = std::vector<std::int64_t>;
constexpr std::int64_t kAll = 1 << 20;   // of all loads
constexpr std::int64_t kUnit = 1 << 20;  // of a share

struct Case {
  int experts = 1, ranks = 1, slots = 1;
  Loads loads = {};
  Ints room = {}, hosts = {}, current = {};
  int max_moves = 0, good_enough = 0;

  PlannedPlacement plan() const {
    xd_ep_planner_args args XD_EP_PLANNER_ARGS_INIT;
    args.num_ranks = ranks;
    args.num_logical_experts = experts;
    args.slots_per_rank = slots;
    args.good_enough_permille = good_enough;
    args.loads = loads.data();
    args.rank_slots = room.empty() ? nullptr : room.data();
    args.rank_hosts = hosts.empty() ? nullptr : hosts.data();
    args.current = current.empty() ? nullptr : current.data();
    args.max_moves = max_moves;
    return plan_placement(read_problem(&args));
  }
  int room_of(int rank) const { return room.empty() ? slots : room[at(rank)]; }
  int used_ranks() const {
    return room.empty() ? ranks : static_cast<int>(ranks - std::ranges::count(room, 0));
  }
};

// Integers from floating-point weights, which add up to kAll.
Loads loads_of(const std::vector<double>& weights) {
  double sum = 0;
  for (const double weight : weights) sum += weight;
  Loads loads = {};
  std::int64_t left = kAll;
  for (const double weight : weights) {
    loads.push_back(static_cast<std::int64_t>(weight / sum * (kAll - 1)));
    left -= loads.back();
  }
  loads[0] += left;
  return loads;
}

Loads random_loads(int experts, std::mt19937& random) {
  std::vector<double> weights(at(experts));
  const auto kind = random() % 4;
  for (std::size_t e = 0; e < weights.size(); ++e) {
    const double x = static_cast<double>(random() % 10000) / 10000;
    switch (kind) {
      case 0:
        weights[e] = 1;
        break;
      case 1:
        weights[e] = std::exp(3 * x);
        break;
      case 2:
        weights[e] = 1 / static_cast<double>(e + 1);
        break;
      default:
        weights[e] = e == 0 ? 1000 : static_cast<double>(random() % 3);
        break;
    }
  }
  return loads_of(weights);
}

// Ranks' loads under a table, in units; every replica of an expert has an equal share.
Loads rank_loads(const Case& c, const Ints& table) {
  std::map<int, int> replicas;
  for (const int e : table) ++replicas[e];
  Loads loads(at(c.ranks));
  for (std::size_t s = 0; s < table.size(); ++s) {
    const int e = table[s];
    if (e >= 0) loads[s / at(c.slots)] += c.loads[at(e)] * kUnit / replicas[e];
  }
  return loads;
}
std::int64_t busiest(const Case& c, const Ints& table) {
  return std::ranges::max(rank_loads(c, table));
}

// The greedy method that EPLB publishes, for one group and one host: the expert with the largest
// load per replica gets the next replica, then the largest share goes onto the lightest rank that
// has a slot left. Of equals the lower expert and the lower rank are first.
Ints published(const Case& c) {
  std::vector<std::int64_t> replicas(at(c.experts), 1);
  const auto share = [&](int e) { return c.loads[at(e)] * kUnit / replicas[at(e)]; };
  for (int left = c.ranks * c.slots - c.experts; left > 0; --left) {
    int largest = 0;
    for (int e = 1; e < c.experts; ++e) {
      if (share(e) > share(largest)) largest = e;
    }
    ++replicas[at(largest)];
  }
  Ints items;
  for (int e = 0; e < c.experts; ++e) items.insert(items.end(), at(replicas[at(e)]), e);
  std::ranges::stable_sort(items, [&](int a, int b) { return share(a) > share(b); });
  Ints table(at(c.ranks * c.slots), -1);
  Loads loads(at(c.ranks));
  Ints used(at(c.ranks));
  for (const int e : items) {
    int lightest = -1;
    for (int r = 0; r < c.ranks; ++r) {
      if (used[at(r)] < c.slots && (lightest < 0 || loads[at(r)] < loads[at(lightest)])) {
        lightest = r;
      }
    }
    table[at(lightest * c.slots + used[at(lightest)]++)] = e;
    loads[at(lightest)] += share(e);
  }
  return table;
}

Case random_case(std::mt19937& random) {
  Case c;
  c.ranks = 1 + static_cast<int>(random() % 8);
  c.slots = 1 + static_cast<int>(random() % 8);
  c.experts = 1 + static_cast<int>(random() % static_cast<unsigned>(c.ranks * c.slots));
  c.loads = random_loads(c.experts, random);
  return c;
}

// Leaves out slots, as long as those left can hold all experts.
void shrink(Case& c, std::mt19937& random) {
  c.room.assign(at(c.ranks), c.slots);
  int left = c.ranks * c.slots - c.experts;
  for (std::int32_t& room : c.room) {
    const int less = std::min(left, static_cast<int>(random() % at(c.slots + 1)));
    room -= less;
    left -= less;
  }
}

// Any table that keeps to the room; some experts may be missing.
Ints random_table(const Case& c, std::mt19937& random) {
  Ints table(at(c.ranks * c.slots));
  for (std::int32_t& expert : table) {
    expert = static_cast<std::int32_t>(random() % at(c.experts + 1)) - 1;
  }
  return table;
}

int moves_between(const Case& c, const Ints& from, const Ints& to) {
  int moves = 0;
  for (int r = 0; r < c.ranks; ++r) {
    std::set<int> held;
    for (int s = 0; s < c.room_of(r); ++s) held.insert(from[at(r * c.slots + s)]);
    for (int s = 0; s < c.slots; ++s) {
      const int e = to[at(r * c.slots + s)];
      moves += e >= 0 && !held.contains(e) ? 1 : 0;
    }
  }
  return moves;
}

// Checks the promises that every placement keeps.
void expect_sound(const Case& c, const PlannedPlacement& planned) {
  const Ints& table = planned.expert_of_slot;
  ASSERT_EQ(table.size(), at(c.ranks * c.slots));
  int doubles = 0;
  std::set<int> placed;
  for (int r = 0; r < c.ranks; ++r) {
    std::set<int> here;
    for (int s = 0; s < c.slots; ++s) {
      const int e = table[at(r * c.slots + s)];
      ASSERT_TRUE(e >= -1 && e < c.experts) << e;
      if (e < 0) continue;
      EXPECT_LT(s, c.room_of(r)) << "rank " << r << " has no such slot";
      doubles += here.insert(e).second ? 0 : 1;
      placed.insert(e);
    }
  }
  EXPECT_EQ(placed.size(), at(c.experts));
  EXPECT_EQ(planned.info.doubles, doubles);
  const double mean = static_cast<double>(kAll * kUnit) / c.used_ranks();
  EXPECT_NEAR(planned.info.busiest_rank, static_cast<double>(busiest(c, table)) / mean, 1e-6);
  if (!c.current.empty()) {
    EXPECT_EQ(planned.info.moves, moves_between(c, c.current, table));
  } else {
    EXPECT_EQ(planned.info.moves, 0);
  }
}

template <class Body>
void for_random_cases(unsigned number, Body&& body) {
  for (unsigned seed = 0; seed < number; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    std::mt19937 random(seed);
    body(random);
    if (testing::Test::HasFailure()) return;
  }
}

TEST(Placement, IsNeverWorseThanThePublishedMethod) {
  for_random_cases(10000, [](std::mt19937& random) {
    const Case c = random_case(random);
    const PlannedPlacement planned = c.plan();
    expect_sound(c, planned);
    const std::int64_t limit = busiest(c, published(c));
    EXPECT_LE(busiest(c, planned.expert_of_slot), limit + limit / 1000000);  // rounding
  });
}

TEST(Placement, FillsAllSlotsOnceAtMost) {
  for_random_cases(5000, [](std::mt19937& random) {
    const Case c = random_case(random);
    const PlannedPlacement planned = c.plan();
    const auto empty = std::ranges::count(planned.expert_of_slot, -1);
    // A rank that has more slots than there are experts leaves some empty, or holds doubles.
    const int useless = c.ranks * std::max(c.slots - c.experts, 0);
    EXPECT_GE(empty + planned.info.doubles, useless);
    if (planned.info.doubles == 0) {
      EXPECT_EQ(empty, useless);
    }
  });
}

TEST(Placement, KeepsToTheRoomOfRanks) {
  for_random_cases(5000, [](std::mt19937& random) {
    Case c = random_case(random);
    shrink(c, random);
    expect_sound(c, c.plan());
  });
}

TEST(Placement, KeepsToTheBoundOfMoves) {
  for_random_cases(5000, [](std::mt19937& random) {
    Case c = random_case(random);
    c.current = c.plan().expert_of_slot;
    c.loads = random_loads(c.experts, random);
    c.max_moves = 1 + static_cast<int>(random() % 5);
    const PlannedPlacement planned = c.plan();
    expect_sound(c, planned);
    EXPECT_LE(planned.info.moves, c.max_moves);
    EXPECT_LE(busiest(c, planned.expert_of_slot), busiest(c, c.current) + 1000);
  });
}

TEST(Placement, StartsFromAnyTable) {
  for_random_cases(5000, [](std::mt19937& random) {
    Case c = random_case(random);
    if (random() % 2 == 0) shrink(c, random);
    c.current = random_table(c, random);
    const PlannedPlacement planned = c.plan();
    expect_sound(c, planned);
    Case scratch = c;
    scratch.current.clear();
    const double slack = 0.0101;
    EXPECT_LE(planned.info.busiest_rank, std::max(1.0, scratch.plan().info.busiest_rank) + slack);
  });
}

TEST(Placement, MovesNothingWhereItIsGoodEnough) {
  for_random_cases(2000, [](std::mt19937& random) {
    Case c = random_case(random);
    c.current = c.plan().expert_of_slot;
    const PlannedPlacement again = c.plan();
    EXPECT_EQ(again.info.moves, 0);
    EXPECT_EQ(again.expert_of_slot, c.current);
  });
}

TEST(Placement, MovesLittleWhereLoadsDrift) {
  std::mt19937 random(7);
  Case c{.experts = 256, .ranks = 8, .slots = 33};
  std::vector<double> weights(256);
  for (double& weight : weights) weight = std::exp(static_cast<double>(random() % 1000) / 300);
  c.loads = loads_of(weights);
  c.current = c.plan().expert_of_slot;
  for (double& weight : weights) weight *= 0.8 + static_cast<double>(random() % 1000) / 2500;
  c.loads = loads_of(weights);
  const PlannedPlacement planned = c.plan();
  expect_sound(c, planned);
  EXPECT_GT(planned.info.busiest_rank_before, 1.01);
  EXPECT_LE(planned.info.busiest_rank, 1.01);
  EXPECT_LE(planned.info.moves, 26);  // a tenth
}

TEST(Placement, DependsOnProportionsAlone) {
  for_random_cases(1000, [](std::mt19937& random) {
    Case c = random_case(random);
    const Ints table = c.plan().expert_of_slot;
    for (std::int64_t& load : c.loads) load *= 1 + static_cast<std::int64_t>(1) * 12345;
    EXPECT_EQ(c.plan().expert_of_slot, table);
  });
}

TEST(Placement, IsTheSameOnAllThreadsAndMachines) {
  std::mt19937 random(3);
  Case c{.experts = 64, .ranks = 8, .slots = 9};
  for (int e = 0; e < c.experts; ++e) c.loads.push_back(static_cast<int>(random() % 1000));
  std::array<Ints, 4> tables;
  std::vector<std::thread> threads;
  for (Ints& table : tables) threads.emplace_back([&] { table = c.plan().expert_of_slot; });
  for (std::thread& thread : threads) thread.join();
  for (const Ints& table : tables) EXPECT_EQ(table, tables[0]);
  // FNV-1a of the table, as the first machine has made it.
  std::uint32_t hash = 2166136261;
  for (const int e : tables[0]) hash = (hash ^ static_cast<std::uint32_t>(e)) * 16777619;
  EXPECT_EQ(hash, 971943328u);
}

TEST(Placement, SpreadsReplicasOverHosts) {
  for_random_cases(2000, [](std::mt19937& random) {
    Case c = random_case(random);
    c.ranks = 4;
    c.slots = 4;
    c.experts = 8;
    c.loads = random_loads(c.experts, random);
    c.hosts = {0, 0, 1, 1};
    c.good_enough = 100000;  // so that balance never breaks the spread
    const Ints table = c.plan().expert_of_slot;
    for (int e = 0; e < c.experts; ++e) {
      const auto first = std::count(table.begin(), table.begin() + 8, e);
      const auto second = std::count(table.begin() + 8, table.end(), e);
      EXPECT_LE(std::abs(first - second), 1) << "expert " << e;
    }
  });
}

TEST(Placement, GivesAHotExpertAReplicaOnEachRank) {
  Case c{.experts = 4, .ranks = 4, .slots = 2, .loads = {1 << 20, 0, 0, 0}};
  const Ints table = c.plan().expert_of_slot;
  for (std::size_t r = 0; r < 4; ++r) {
    EXPECT_EQ((table[2 * r] == 0) + (table[2 * r + 1] == 0), 1) << "rank " << r;
  }
}

TEST(Placement, TakesLoadsOfZeroAsEqual) {
  Case zero{.experts = 6, .ranks = 3, .slots = 4, .loads = Loads(6, 0)};
  Case equal = zero;
  equal.loads.assign(6, 7);
  EXPECT_EQ(zero.plan().expert_of_slot, equal.plan().expert_of_slot);
  EXPECT_DOUBLE_EQ(equal.plan().info.busiest_rank, zero.plan().info.busiest_rank);
}

TEST(Placement, PlacesTheExpertsOfARankThatIsGoneWhateverTheBound) {
  // Rank 1 alone holds experts 2 and 3.
  Case c{.experts = 6, .ranks = 4, .slots = 2, .loads = Loads(6, kAll / 6)};
  c.current = {0, 1, 2, 3, 4, 5, 0, 1};
  c.room = {2, 0, 2, 2};
  c.max_moves = 1;
  const PlannedPlacement planned = c.plan();
  const Ints& table = planned.expert_of_slot;
  EXPECT_EQ(planned.info.busiest_rank_before, 0);
  EXPECT_EQ(planned.info.moves, 2);
  for (int e = 0; e < 6; ++e) EXPECT_EQ(std::ranges::count(table, e), 1) << "expert " << e;
  EXPECT_EQ(table[4], 4);  // nothing of rank 2 gives way
  EXPECT_EQ(table[5], 5);
}

std::string refusal(const Case& c) {
  try {
    c.plan();
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), XD_ERROR_INVALID_ARGUMENT);
    return error.text();
  }
  return "taken";
}

TEST(Placement, RefusesWhatItCannotPlan) {
  const Case good{.experts = 3, .ranks = 2, .slots = 2, .loads = {1, 2, 3}};
  const auto with = [&](auto&& change) {
    Case c = good;
    change(c);
    return refusal(c);
  };
  EXPECT_EQ(refusal(good), "taken");
  EXPECT_EQ(with([](Case& c) { c.loads[1] = -5; }), "args.loads[1] = -5, expected 0 or more");
  EXPECT_EQ(with([](Case& c) { c.loads[2] = INT64_MAX; }),
            "args.loads: their sum up to expert 2 is 2^62 or more, expected less");
  EXPECT_EQ(with([](Case& c) { c.experts = 5; }),
            "args.num_logical_experts = 5, expected 1 to the 4 slots that may be used");
  EXPECT_EQ(with([](Case& c) {
              c.room = {2, 0};
            }),
            "args.num_logical_experts = 3, expected 1 to the 2 slots that may be used");
  EXPECT_EQ(with([](Case& c) { c.room = {2, 3}; }), "args.rank_slots[1] = 3, expected 0 to 2");
  EXPECT_EQ(with([](Case& c) { c.hosts = {0, 2}; }), "args.rank_hosts[1] = 2, expected 0 to 1");
  EXPECT_EQ(with([](Case& c) {
              c.current = {0, 1, 2, 3};
            }),
            "args.current[3] = 3, expected -1 to 2");
  EXPECT_EQ(with([](Case& c) { c.max_moves = -1; }), "args.max_moves = -1, expected 0 or more");
  EXPECT_EQ(with([](Case& c) { c.good_enough = 999; }),
            "args.good_enough_permille = 999, expected 0 or 1000 to 1000000");
  EXPECT_EQ(with([](Case& c) { c.ranks = 0; }), "num_ranks = 0, expected 1 to 1024");
  EXPECT_EQ(with([](Case& c) { c.slots = 40000; }),
            "slots_per_rank = 40000, expected 1 to 32768 on each of 2 ranks");
}

// Carries out a list of moves on tagged slots.
TEST(Placement, MovesMakeTheNewPlacement) {
  for_random_cases(2000, [](std::mt19937& random) {
    const Case c = random_case(random);
    const Ints from = random_table(c, random), to = random_table(c, random);
    Ints made = from;
    for (const xd_ep_move& move : placement_moves(c.ranks, c.slots, from.data(), to.data())) {
      EXPECT_NE(from[at(move.to_slot)], move.expert);
      made[at(move.to_slot)] = move.expert;
      const auto held = std::ranges::count(from, move.expert);
      ASSERT_EQ(move.from_slot >= 0, held > 0);
      if (held > 0) {
        EXPECT_EQ(from[at(move.from_slot)], move.expert);
      }
    }
    for (std::size_t s = 0; s < to.size(); ++s) {
      EXPECT_TRUE(to[s] < 0 || made[s] == to[s]) << "slot " << s;
    }
  });
}

TEST(Placement, MovesReadFromTheirOwnRankOrInTurn) {
  // Expert 0 is on ranks 0 and 1; ranks 2 and 3 want it, and rank 1 once more.
  const Ints from = {0, 9, 0, 8, 1, 2, 3, 4}, to = {0, 9, 0, 0, 0, 2, 0, 4};
  const auto moves = placement_moves(4, 2, from.data(), to.data());
  ASSERT_EQ(moves.size(), 3u);
  EXPECT_EQ(moves[0].from_slot, 2);
  EXPECT_EQ(moves[1].from_slot, 0);
  EXPECT_EQ(moves[2].from_slot, 2);
}

}  // namespace
}  // namespace xd::ep
