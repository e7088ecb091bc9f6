// The decision of ranks on several machines, in every order of their steps and of what they hear of
// one another, and with the end of ranks and of connections. The ranks run the library's own steps
// (comm/views/far_decision.h); the test is the network.
#include "comm/views/far_decision.h"

#include <gtest/gtest.h>

#include <array>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "base/math.h"
#include "unit/views_support.h"

namespace xd::test {
namespace {

constexpr int kMost = 5;

struct Rank {
  std::optional<FarDecision> decision;
  View view;
  Card card;  // as others may hear it
  Vote vote;
  std::vector<Card> heard;  // by rank
  Members gone;
  bool dead = false, late = false;
  int ballots_left = 0, calls_left = 0;
};

// Ranks, each with its own knowledge of the others. A copy is another course of the same beginning.
class World {
 public:
  World(int num_ranks, const View& first, const std::vector<Vote>& votes, int calls, int ballots)
      : num_ranks_(num_ranks), ballots_(ballots) {
    for (int r = 0; r < num_ranks; ++r) {
      Rank& rank = ranks[at(r)];
      rank.view = first;
      rank.vote = votes[at(r)];
      rank.heard.resize(at(num_ranks));
      rank.calls_left = calls;
      begin(r);
    }
  }

  std::array<Rank, kMost> ranks;
  std::array<std::optional<View>, 8> got;  // by number, as ranks have got it
  std::string failure;
  bool anyone_late = false;
  bool two_members = false;  // and no guests

  // The end of a call by time. The next one votes otherwise.
  void give_up(int r) {
    Rank& rank = ranks[at(r)];
    rank.decision->withdraw();
    rank.card = rank.decision->card();
    rank.view = rank.decision->view();
    rank.decision.reset();
    if (rank.calls_left > 0) begin(r);
  }

  // True if something has come of it.
  bool step(int r, bool begins) {
    Rank& rank = ranks[at(r)];
    if (begins) --rank.ballots_left;
    const bool voted = rank.decision->is_voted();
    const bool changed = rank.decision->step(
        {.cards = rank.heard, .gone = rank.gone, .late = rank.late, .begin = begins});
    rank.card = rank.decision->card();
    const bool is_news = changed || rank.decision->is_voted() != voted;
    if (rank.decision->outcome() != Outcome::none) end(r);
    return is_news;
  }
  bool can_begin(int r) const {
    const Rank& rank = ranks[at(r)];
    return rank.decision->is_voted() && rank.ballots_left > 0;
  }
  bool has_news(int from, int to) const {
    return ranks[at(to)].heard[at(from)].serial < ranks[at(from)].card.serial;
  }
  void hear(int from, int to) { ranks[at(to)].heard[at(from)] = ranks[at(from)].card; }

  std::string key() const {
    std::string key;
    for (int r = 0; r < num_ranks_; ++r) {
      const Rank& rank = ranks[at(r)];
      key += rank.dead ? "|d" : rank.late ? "|l" : "|";
      if (rank.decision) key += rank.decision->is_voted() ? 'V' : 'v';
      key += std::to_string(rank.ballots_left) + ',' + std::to_string(rank.calls_left) + ',' +
             std::to_string(rank.gone.words()[0]) + text_of(rank.card);
      for (int from = 0; from < num_ranks_; ++from)
        if (from != r) key += text_of(rank.heard[at(from)]);
    }
    return key;
  }

 private:
  static std::string text_of(const Card& card) {
    const auto view = [](const View& v) {
      return std::to_string(v.number) + ':' + std::to_string(v.members.words()[0]) + ':' +
             std::to_string(v.first_step) + ':' + std::to_string(v.last_step);
    };
    return ';' + std::to_string(card.vote.number) + '.' + std::to_string(card.vote.call) + ',' +
           std::to_string(card.number) + ',' + std::to_string(card.promised) + ',' +
           std::to_string(card.accepted) + ',' + view(card.proposal.view) + ',' +
           view(card.latest.view);
  }

  void begin(int r) {
    Rank& rank = ranks[at(r)];
    ++rank.vote.call;
    rank.vote.step += r == 0 ? 100 : -100;
    rank.decision.emplace(r, num_ranks_, rank.view, rank.card, rank.vote);
    rank.card = rank.decision->card();
    rank.late = false;
    rank.ballots_left = ballots_;
    --rank.calls_left;
  }

  void end(int r) {
    Rank& rank = ranks[at(r)];
    const View view = rank.decision->view();
    const bool is_member = rank.decision->outcome() == Outcome::member;
    if (is_member != view.members.has(r)) failure = "a member is not in its view";
    if (is_member && rank.card.latest.calls[at(r)] != rank.vote.call)
      failure = "an older call has voted";
    // Of two members the step of rank 0 is the highest one, and that of rank 1 the lowest.
    if (is_member && two_members && (r == 0 ? view.last_step : view.first_step) != rank.vote.step)
      failure = "an older call's step counts";
    auto& known = got[view.number];
    if (known && !(*known == view)) failure = "two views of number " + std::to_string(view.number);
    known = view;
    rank.view = view;
    rank.decision.reset();
    if (rank.calls_left > 0) begin(r);
  }

  int num_ranks_;
  int ballots_;
};

struct Bounds {
  int deaths, lates;
  bool give_ups = false;  // also where ranks have other things to do
};

// All that can happen next, by one event. A rank that dies is heard of for the last time before
// that is noticed, or never.
std::vector<World> next_of(const World& world, int num_ranks, const Bounds& bounds) {
  std::vector<World> next;
  int deaths = 0, lates = 0;
  for (int r = 0; r < num_ranks; ++r) {
    deaths += world.ranks[at(r)].dead ? 1 : 0;
    lates += world.ranks[at(r)].late ? 1 : 0;
  }
  const auto add = [&](auto event) {
    next.push_back(world);
    if (!event(next.back())) next.pop_back();
  };
  for (int r = 0; r < num_ranks; ++r) {
    const Rank& rank = world.ranks[at(r)];
    if (rank.dead) continue;
    for (int from = 0; from < num_ranks; ++from) {
      if (from == r) continue;
      if (world.has_news(from, r))
        add([&](World& w) {
          w.hear(from, r);
          return true;
        });
      if (world.ranks[at(from)].dead && !rank.gone.has(from))
        add([&](World& w) {
          w.ranks[at(r)].gone.add(from);
          return true;
        });
    }
    if (!rank.decision) continue;
    add([&](World& w) { return w.step(r, false); });
    if (world.can_begin(r)) add([&](World& w) { return w.step(r, true); });
    if (!rank.late && lates < bounds.lates)
      add([&](World& w) { return w.ranks[at(r)].late = w.anyone_late = true; });
    if (bounds.give_ups)
      add([&](World& w) {
        w.give_up(r);
        return true;
      });
    if (deaths < bounds.deaths) add([&](World& w) { return w.ranks[at(r)].dead = true; });
  }
  return next;
}

struct Explored {
  std::size_t states = 0, decided = 0;
};

Explored explore(const World& start, int num_ranks, const Bounds& bounds) {
  std::unordered_set<std::string> seen{start.key()};
  std::vector<World> open{start};
  Explored result;
  while (!open.empty()) {
    const World world = std::move(open.back());
    open.pop_back();
    std::vector<World> next = next_of(world, num_ranks, bounds);
    if (next.empty() && world.got[1]) ++result.decided;
    for (World& w : next) {
      if (!w.failure.empty()) {
        ADD_FAILURE() << w.failure << " after " << w.key();
        return result;
      }
      if (seen.insert(w.key()).second) open.push_back(std::move(w));
    }
  }
  result.states = seen.size();
  return result;
}

// Two ranks, each of which may begin two ballots, late or not, alive or not.
TEST(FarDecision, GivesOneViewInEveryOrderOfTwoRanks) {
  const World start(2, first_view(0b11), votes_of(2), 1, 2);
  const Explored all = explore(start, 2, {.deaths = 1, .lates = 2});
  EXPECT_GT(all.states, 1000U);
  EXPECT_GT(all.decided, 0U);
}

// A call of rank 1 ends by time anywhere, and the next one votes otherwise.
TEST(FarDecision, CountsTheVoteOfARanksOwnCallInEveryOrder) {
  World start(2, first_view(0b11), votes_of(2), 1, 1);
  start.two_members = true;
  start.ranks[1].calls_left = 1;
  const Explored all = explore(start, 2, {.deaths = 0, .lates = 1, .give_ups = true});
  EXPECT_GT(all.states, 1000U);
}

// Rank 0 counts a vote whose call has ended, and decides. The next call of rank 1 finds that, and
// waits for a view that counts its own vote.
TEST(FarDecision, VotesOnWhereAnEndedCallHasBeenCounted) {
  World world(2, first_view(0b11), votes_of(2), 2, 2);
  world.hear(1, 0);
  world.hear(0, 1);
  for (const int r : {0, 1}) world.step(r, false);
  ASSERT_TRUE(world.can_begin(0));
  world.step(0, true);  // half of the members with the lowest one
  for (int i = 0; i < 4 && !world.got[1]; ++i) world.step(0, false);
  ASSERT_TRUE(world.got[1]);
  EXPECT_EQ(world.got[1]->members.count(), 2);
  world.ranks[1].vote.ok = 0;
  world.give_up(1);
  world.hear(0, 1);
  world.step(1, false);
  ASSERT_TRUE(world.ranks[1].decision);
  EXPECT_EQ(world.ranks[1].decision->view().number, 1U);
  world.ranks[0].decision->step({world.ranks[0].heard, {}, false, false});
  for (int i = 0; i < 8 && !world.got[2]; ++i) {
    for (const int r : {0, 1}) {
      world.hear(1 - r, r);
      if (world.ranks[at(r)].decision) world.step(r, r == 0 && world.can_begin(0));
    }
  }
  ASSERT_TRUE(world.got[2]);
  EXPECT_EQ(world.got[2]->all_ok, 0);
  EXPECT_EQ(world.failure, "");
}

// Promises and acceptances of a rank count on when its vote does not.
TEST(FarDecision, KeepsPromisesOfARankThatGaveUp) {
  FarDecision decision(1, 2, first_view(0b11), {}, Vote{});
  Card leader;
  leader.number = 1;
  leader.promised = 1U << 16 | 1;
  const std::vector<Card> heard{leader, Card{}};
  decision.step({heard, {}, false, false});
  decision.withdraw();
  EXPECT_EQ(decision.card().vote.number, 0U);
  EXPECT_EQ(decision.card().number, 1U);
  EXPECT_EQ(decision.card().promised, leader.promised);
}

// Three ranks of which one has no patience from the start: ballots for different views.
TEST(FarDecision, GivesOneViewInEveryOrderOfThreeRanks) {
  if (kSanitized) GTEST_SKIP() << "explored without sanitizers";
  std::vector<Vote> votes = votes_of(3);
  World start(3, first_view(0b111), votes, 1, 1);
  start.ranks[2].ballots_left = 0;
  start.ranks[1].late = true;
  const Explored all = explore(start, 3, {.deaths = 0, .lates = 1});
  EXPECT_GT(all.states, 10000U);
  EXPECT_GT(all.decided, 0U);
}

TEST(FarDecision, GivesOneViewInRandomOrdersWithDeathsCutsAndGuests) {
  constexpr unsigned kSeeds = kSanitized ? 15 : 300;
  std::size_t views = 0;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return random() % n; };
    const int n = 2 + static_cast<int>(below(4));
    const auto members = 1 + static_cast<unsigned>(below((1U << n) - 1));
    std::vector<Vote> votes = votes_of(n);
    for (Vote& vote : votes) vote.leave = below(12) == 0 ? 1 : 0;
    World world(n, first_view(members), votes, 3, 4);
    const Bounds bounds{static_cast<int>(below(3)), static_cast<int>(below(4)), below(2) == 0};
    for (;;) {
      std::vector<World> next = next_of(world, n, bounds);
      if (next.empty()) break;
      world = next[below(next.size())];
      ASSERT_EQ(world.failure, "") << "seed " << seed;
    }
    for (const auto& view : world.got) views += view ? 1 : 0;
  }
  EXPECT_GT(views, kSeeds / 2);
}

// ---- Progress ----

// Everyone hears everything at once, and only the lowest rank begins ballots, one each time that
// nothing else moves.
void run_in_peace(World& world, int num_ranks, int leader) {
  for (int idle = 0; idle < 2;) {
    bool moved = false;
    for (int r = 0; r < num_ranks; ++r) {
      if (world.ranks[at(r)].dead || !world.ranks[at(r)].decision) continue;
      for (int from = 0; from < num_ranks; ++from)
        if (!world.ranks[at(from)].dead) world.hear(from, r);
      moved = world.step(r, false) || moved;
    }
    if (moved) {
      idle = 0;
      continue;
    }
    ++idle;
    if (world.ranks[at(leader)].decision && world.can_begin(leader)) world.step(leader, true);
  }
}

TEST(FarDecision, OfMostMembersOrHalfWithTheLowestComesToAnEnd) {
  for (const unsigned dead : {0U, 0b1000U, 0b1100U, 0b0100U, 0b0011U, 0b0111U, 0b1110U}) {
    World world(4, first_view(0b1111), votes_of(4), 1, 3);
    Members alive = Members::all(4);
    for (int r = 0; r < 4; ++r) {
      if ((dead >> r & 1) == 0) continue;
      alive.remove(r);
      world.ranks[at(r)].dead = true;
      for (Rank& rank : world.ranks) rank.gone.add(r);
    }
    run_in_peace(world, 4, alive.lowest());
    const bool can = 2 * alive.count() > 4 || (2 * alive.count() == 4 && alive.has(0));
    for (int r = 0; r < 4; ++r) {
      if (!alive.has(r)) continue;
      EXPECT_EQ(world.ranks[at(r)].decision.has_value(), !can) << "dead " << dead << ", rank " << r;
      EXPECT_TRUE(!can || world.ranks[at(r)].view.members == alive);
    }
    EXPECT_EQ(world.failure, "");
  }
}

}  // namespace
}  // namespace xd::test
