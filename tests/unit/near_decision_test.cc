// The decision of ranks that share memory, in every order in which ranks can make their accesses,
// and with the end of ranks at each of them. The ranks run the library's own steps
// (comm/views/near_decision.h); the test has the memory.
#include "comm/views/near_decision.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "unit/views_support.h"

namespace xd::test {
namespace {

constexpr int kMost = 4;

struct Rank {
  std::optional<NearDecision> decision;
  View view;  // the latest that it has got
  Vote vote;
  bool dead = false;
  bool late = false;
  int waits_since = -1;  // number of the store after which it has looked at everything; -1 = none
  int calls_left = 0;
  std::array<std::uint64_t, kMost> tallied{};  // the calls whose votes its proposal counts
  unsigned gone = 0;                           // the ranks that it knows to be lost
  // Its last access, and what that gave: with its tally and its view all that its next step
  // depends on.
  std::string last;
};

// Ranks, and the memory that they share. A copy is another course of the same beginning.
class World final : public NearPlaces {
 public:
  World(int num_ranks, const View& first, const std::vector<Vote>& votes, int calls)
      : num_ranks_(num_ranks) {
    for (int r = 0; r < num_ranks; ++r) {
      Rank& rank = ranks[at(r)];
      rank.view = first;
      rank.vote = votes[at(r)];
      rank.calls_left = calls;
      begin(r);
    }
  }

  std::array<Rank, kMost> ranks;
  // By number, as ranks have got it, and the calls whose votes it counts, by rank.
  std::array<std::optional<View>, 8> got;
  std::array<std::array<std::uint64_t, kMost>, 8> counted{};
  std::string failure;
  bool anyone_late = false;

  bool can_step(int r) const {
    const Rank& rank = ranks[at(r)];
    return !rank.dead && rank.decision &&
           (rank.waits_since != stores_ || (rank.late && !looked_late_[at(r)]));
  }
  // `torn`: it dies in this step; a store that the step makes is half done.
  void step(int r, bool torn) {
    actor_ = r;
    torn_ = torn;
    Rank& rank = ranks[at(r)];
    const int stores = stores_;
    looked_late_[at(r)] = rank.late;
    const bool goes_on = rank.decision->step(*this, rank.late);
    rank.waits_since = goes_on || stores != stores_ ? -1 : stores_;
    if (torn) {
      rank.dead = true;
      return;
    }
    if (rank.decision->outcome() != Outcome::none) end(r);
  }
  void notice(int observer, int dead) {
    ranks[at(observer)].gone |= 1U << dead;
    ranks[at(observer)].waits_since = -1;
  }
  void make_late(int r) {
    ranks[at(r)].late = anyone_late = true;
    ranks[at(r)].waits_since = -1;
  }

  std::string key() const {
    std::string key = std::to_string(word_.word());
    for (const std::uint64_t call : counted[word_.number()]) key += '.' + std::to_string(call);
    for (int r = 0; r < num_ranks_; ++r) {
      const Rank& rank = ranks[at(r)];
      key += '|';
      if (rank.dead) key += 'd';
      if (rank.late) key += 'l';
      if (rank.waits_since == stores_) key += 'w';
      if (looked_late_[at(r)]) key += 'L';
      key += std::to_string(rank.gone) + ',' + std::to_string(rank.calls_left) + ',' +
             (votes_[at(r)] ? std::to_string(votes_[at(r)]->number) + '.' +
                                  std::to_string(votes_[at(r)]->call)
                            : "torn");
      for (const std::uint64_t call : rank.tallied) key += '.' + std::to_string(call);
      for (const auto& proposal : proposals_[at(r)])
        key += proposal ? ',' + std::to_string(proposal->number) + ':' +
                              std::to_string(proposal->members.words()[0])
                        : ",torn";
      if (!rank.decision) continue;
      const NearDecision& d = *rank.decision;
      key += ';' + rank.last + ',' + std::to_string(d.view().number) + ',' +
             std::to_string(d.view().members.words()[0]) + ',' +
             std::to_string(d.tally().voters.words()[0]) + ',' +
             std::to_string(d.tally().gone.words()[0]);
      for (const Vote& vote : d.tally().votes) key += '.' + std::to_string(vote.call);
    }
    return key;
  }

  // ---- The memory ----

  void publish(const Vote& vote) override {
    note("publish" + std::to_string(vote.number));
    store(votes_[at(actor_)], vote);
  }
  std::optional<Vote> vote(int rank) override {
    note("vote" + std::to_string(rank));
    return votes_[at(rank)];
  }
  bool is_gone(int rank) override {
    note("gone" + std::to_string(rank));
    return (ranks[at(actor_)].gone >> rank & 1) != 0;
  }
  void propose(const View& view) override {
    note("propose");
    Rank& rank = ranks[at(actor_)];
    const Tally& tally = rank.decision->tally();
    for (int r = 0; r < num_ranks_; ++r)
      rank.tallied[at(r)] = tally.voters.has(r) ? tally.votes[at(r)].call : 0;
    store(proposals_[at(actor_)][view.number % 2], view);
  }
  std::optional<View> proposal(DecisionWord word) override {
    const auto& view = proposals_[at(word.proposer())][word.number() % 2];
    note("proposal" + std::to_string(view ? view->number : 0));
    return view;
  }
  DecisionWord decided() override {
    note("decided" + std::to_string(word_.word()));
    return word_;
  }
  bool decide(DecisionWord before, DecisionWord next) override {
    if (torn_ || word_.word() != before.word()) {
      note("decide nothing");
      return false;
    }
    note("decide");
    if (next.number() > before.number()) counted[next.number()] = ranks[at(actor_)].tallied;
    word_ = next;
    ++stores_;
    return true;
  }

 private:
  void note(const std::string& access) { ranks[at(actor_)].last = access; }
  template <class Place, class Value>
  void store(Place& place, const Value& value) {
    if (torn_) {
      place = std::nullopt;
    } else {
      place = value;
    }
    ++stores_;
  }

  void begin(int r) {
    Rank& rank = ranks[at(r)];
    ++rank.vote.call;
    rank.vote.step += 100;
    rank.decision.emplace(r, num_ranks_, rank.view, rank.vote);
    rank.waits_since = -1;
    rank.late = false;
    rank.last = "begin";
    looked_late_[at(r)] = false;
    --rank.calls_left;
  }

  void end(int r) {
    Rank& rank = ranks[at(r)];
    const NearDecision& d = *rank.decision;
    if (d.outcome() == Outcome::member) {
      if (!d.view().members.has(r)) failure = "a member is not in its view";
      if (counted[d.view().number][at(r)] != rank.vote.call) failure = "an older call has voted";
      expect_one(d.view());
    }
    rank.view = d.view();
    rank.decision.reset();
    if (rank.calls_left > 0) begin(r);
  }

  void expect_one(const View& view) {
    auto& known = got[view.number];
    if (known && !(*known == view)) {
      failure = "two views of number " + std::to_string(view.number);
    }
    known = view;
  }

  int num_ranks_;
  std::array<std::optional<Vote>, kMost> votes_{Vote{}, Vote{}, Vote{}, Vote{}};
  std::array<std::array<std::optional<View>, 2>, kMost> proposals_{
      {{View{}, View{}}, {View{}, View{}}, {View{}, View{}}, {View{}, View{}}}};
  DecisionWord word_;
  int stores_ = 0;
  int actor_ = 0;
  bool torn_ = false;
  std::array<bool, kMost> looked_late_{};
};

struct Bounds {
  int deaths, lates;
};

// All that can happen next, by one event. None: it is the end.
std::vector<World> next_of(const World& world, int num_ranks, const Bounds& bounds) {
  std::vector<World> next;
  const auto add = [&](auto event) {
    next.push_back(world);
    event(next.back());
  };
  int deaths = 0, lates = 0;
  for (int r = 0; r < num_ranks; ++r) {
    deaths += world.ranks[at(r)].dead ? 1 : 0;
    lates += world.ranks[at(r)].late ? 1 : 0;
  }
  for (int r = 0; r < num_ranks; ++r) {
    if (world.can_step(r)) add([&](World& w) { w.step(r, false); });
    for (int dead = 0; dead < num_ranks; ++dead) {
      const bool is_news = world.ranks[at(dead)].dead && (world.ranks[at(r)].gone >> dead & 1) == 0;
      if (is_news && world.ranks[at(r)].decision) add([&](World& w) { w.notice(r, dead); });
    }
  }
  // A rank that nothing else moves is late some time.
  const bool stands = next.empty();
  for (int r = 0; r < num_ranks; ++r) {
    const Rank& rank = world.ranks[at(r)];
    if (rank.dead || !rank.decision) continue;
    if (world.can_step(r) && deaths < bounds.deaths) add([&](World& w) { w.step(r, true); });
    if (!rank.late && (stands || lates < bounds.lates)) add([&](World& w) { w.make_late(r); });
  }
  return next;
}

// Goes through all courses. Returns the number of states. `at_end` looks at each end.
template <class AtEnd>
std::size_t explore(const World& start, int num_ranks, const Bounds& bounds, AtEnd at_end) {
  std::unordered_set<std::string> seen{start.key()};
  std::vector<World> open{start};
  while (!open.empty()) {
    const World world = std::move(open.back());
    open.pop_back();
    std::vector<World> next = next_of(world, num_ranks, bounds);
    if (next.empty()) at_end(world);
    for (World& w : next) {
      if (!w.failure.empty()) {
        ADD_FAILURE() << w.failure << " after " << w.key();
        return seen.size();
      }
      if (seen.insert(w.key()).second) open.push_back(std::move(w));
    }
  }
  return seen.size();
}

// Every rank that lives has an outcome, and without the end of a rank's patience all of them are
// members.
void expect_ended(const World& world, int num_ranks) {
  for (int r = 0; r < num_ranks; ++r) {
    const Rank& rank = world.ranks[at(r)];
    if (rank.dead) continue;
    ASSERT_FALSE(rank.decision) << "rank " << r << " waits for ever: " << world.key();
    ASSERT_TRUE(world.anyone_late || rank.view.members.has(r)) << world.key();
  }
}

TEST(NearDecision, GivesOneViewInEveryOrderOfTwoRanksThatDecideTwice) {
  const World start(2, first_view(0b11), votes_of(2), 2);
  int ends = 0;
  const std::size_t states = explore(start, 2, {.deaths = 1, .lates = 1}, [&](const World& world) {
    ++ends;
    expect_ended(world, 2);
  });
  EXPECT_GT(states, 1000U);
  EXPECT_GT(ends, 10);
  RecordProperty("states", static_cast<int>(states));
}

TEST(NearDecision, GivesOneViewInEveryOrderOfThreeRanksOfWhichOneDies) {
  if (kSanitized) GTEST_SKIP() << "explored without sanitizers";
  const World start(3, first_view(0b111), votes_of(3), 1);
  int with_all = 0, without_one = 0;
  const std::size_t states = explore(start, 3, {.deaths = 1, .lates = 0}, [&](const World& world) {
    expect_ended(world, 3);
    if (!world.got[1]) return;
    with_all += world.got[1]->members.count() == 3 ? 1 : 0;
    without_one += world.got[1]->members.count() == 2 ? 1 : 0;
  });
  EXPECT_GT(states, 10000U);
  EXPECT_GT(with_all, 0);
  EXPECT_GT(without_one, 0);
}

TEST(NearDecision, GivesOneViewInEveryOrderOfThreeRanksWithAGuestAndALateOne) {
  const World start(3, first_view(0b011), votes_of(3), 1);
  int taken_in = 0, outside = 0;
  explore(start, 3, {.deaths = 0, .lates = 1}, [&](const World& world) {
    expect_ended(world, 3);
    taken_in += world.ranks[2].view.members.has(2) ? 1 : 0;
    outside += world.ranks[2].view.members.has(2) ? 0 : 1;
  });
  EXPECT_GT(taken_in, 0);
  EXPECT_GT(outside, 0);
}

// A guest that waits no more takes its vote back, or finds that it has been counted. A view
// that a later call returns counts that call's vote.
TEST(NearDecision, CountsTheVoteOfAGuestsOwnCallInEveryOrder) {
  World start(2, first_view(0b01), votes_of(2), 1);
  start.ranks[1].calls_left = 2;
  int taken_in = 0, late_and_taken_in = 0;
  explore(start, 2, {.deaths = 1, .lates = 2}, [&](const World& world) {
    expect_ended(world, 2);
    taken_in += world.got[1] && world.counted[1][1] == 1 ? 1 : 0;
    late_and_taken_in += world.got[1] && world.counted[1][1] == 2 ? 1 : 0;
  });
  EXPECT_GT(taken_in, 0);
  EXPECT_GT(late_and_taken_in, 0);
}

// Ranks that have been left out go on alone when all members have ended.
TEST(NearDecision, LetsGuestsDecideWhenNoMemberIsLeft) {
  World start(3, first_view(0b001), votes_of(3), 1);
  start.ranks[0].dead = true;
  for (Rank& rank : start.ranks) rank.gone = 0b001;
  int both = 0, one = 0;  // the other one is a guest of the next view
  explore(start, 3, {.deaths = 1, .lates = 0}, [&](const World& world) {
    ASSERT_TRUE(world.got[1]) << world.key();
    both += world.got[1]->members.count() == 2 ? 1 : 0;
    one += world.got[1]->members.count() == 1 ? 1 : 0;
  });
  EXPECT_GT(both, 0);
  EXPECT_GT(one, 0);
}

TEST(NearDecision, GivesOneViewInRandomOrders) {
  constexpr unsigned kSeeds = kSanitized ? 200 : 4000;
  std::size_t views = 0;
  for (unsigned seed = 0; seed < kSeeds; ++seed) {
    std::mt19937 random(seed);
    const auto below = [&](std::size_t n) { return random() % n; };
    const unsigned members = 1 + static_cast<unsigned>(below(15));
    std::vector<Vote> votes = votes_of(4);
    for (Vote& vote : votes) {
      vote.leave = below(12) == 0 ? 1 : 0;
      vote.ok = below(4) == 0 ? 0 : 1;
    }
    if (below(4) == 0) votes[1].leave_out.add(3);
    World world(4, first_view(members), votes, 3);
    const Bounds bounds{static_cast<int>(below(3)), static_cast<int>(below(3))};
    for (;;) {
      std::vector<World> next = next_of(world, 4, bounds);
      if (next.empty()) break;
      world = next[below(next.size())];
      ASSERT_EQ(world.failure, "") << "seed " << seed;
    }
    for (int r = 0; r < 4; ++r) {
      ASSERT_TRUE(world.ranks[at(r)].dead || !world.ranks[at(r)].decision) << "seed " << seed;
    }
    for (const auto& view : world.got) views += view ? 1 : 0;
  }
  EXPECT_GT(views, kSeeds);
}

// A guest reads the word, and before it reads the view the proposer has written its place again.
TEST(NearDecision, TakesNoViewThatIsOnlyProposed) {
  World world(3, first_view(0b011), votes_of(3), 3);
  const auto run = [&](int r, std::uint64_t number) {
    while (world.ranks[at(r)].view.number < number) world.step(r, false);
  };
  world.step(1, false);  // votes
  run(0, 1);
  while (world.ranks[2].last != "decided" + std::to_string(DecisionWord(1, 0).word()))
    world.step(2, false);
  run(1, 1);
  world.step(0, false);
  run(1, 2);
  run(0, 2);
  world.step(1, false);
  while (world.ranks[0].last != "propose") world.step(0, false);
  world.step(2, false);
  EXPECT_EQ(world.ranks[2].last, "proposal3");
  EXPECT_EQ(world.ranks[2].decision->view().number, 0U);
  run(0, 3);
  while (world.ranks[2].decision->view().number < 3) world.step(2, false);
  EXPECT_EQ(world.ranks[2].decision->view(), world.ranks[0].view);
}

// ---- The view that votes make ----

TEST(Tally, TakesStepsAndAgreementOfMembersAlone) {
  const View before = first_view(0b1111);
  Tally tally(4);
  for (int r = 0; r < 4; ++r) {
    tally.voters.add(r);
    tally.votes[at(r)].step = 100 * r - 50;
  }
  tally.votes[0].leave = 1;
  tally.votes[0].ok = 0;
  tally.gone.add(3);
  View view = tally.view(before);
  EXPECT_EQ(view.number, 1U);
  EXPECT_EQ(view.members, Members(Members::Words{0b0110}));
  EXPECT_EQ(view.first_step, 50);
  EXPECT_EQ(view.last_step, 150);
  EXPECT_EQ(view.all_ok, 1);
  tally.votes[2].ok = 0;
  EXPECT_EQ(tally.view(before).all_ok, 0);
}

TEST(Tally, LetsGuestsAndLeaversHaveNoSay) {
  const View before = first_view(0b0111);
  Tally tally(4);
  for (int r = 0; r < 4; ++r) {
    tally.voters.add(r);
    tally.votes[at(r)].step = 100 - 10 * r;
  }
  tally.votes[0].leave = 1;
  tally.votes[0].leave_out.add(1);
  tally.votes[3].leave_out.add(2);
  tally.votes[3].ok = 0;
  View view = tally.view(before);
  EXPECT_EQ(view.members, Members(Members::Words{0b1110}));
  EXPECT_EQ(view.first_step, 80);
  EXPECT_EQ(view.last_step, 90);
  EXPECT_EQ(view.all_ok, 1);
  for (const int member : {1, 2}) tally.gone.add(member);
  view = tally.view(before);
  EXPECT_EQ(view.members, Members(Members::Words{0b1000}));
  EXPECT_EQ(view.first_step, 70);
  EXPECT_EQ(view.all_ok, 0);
}

TEST(Tally, TakesNoWordOfARankThatALowerOneHasLeftOut) {
  Tally tally(3);
  for (int r = 0; r < 3; ++r) tally.voters.add(r);
  tally.votes[0].leave_out.add(1);
  tally.votes[1].leave_out.add(2);
  EXPECT_EQ(tally.view(first_view(0b111)).members, Members(Members::Words{0b101}));
  tally.votes[0].leave_out = {};
  tally.votes[1].leave_out = Members(Members::Words{0b001});
  tally.votes[2].leave_out = Members(Members::Words{0b010});
  EXPECT_EQ(tally.view(first_view(0b111)).members, Members(Members::Words{0b100}));
}

TEST(Tally, OfTwoRanksThatNameEachOtherLeavesTheLowerOne) {
  const View before = first_view(0b111);
  Tally tally(3);
  for (int r = 0; r < 3; ++r) tally.voters.add(r);
  tally.votes[0].leave_out.add(2);
  tally.votes[2].leave_out.add(0);
  tally.votes[2].leave_out.add(1);
  EXPECT_EQ(tally.view(before).members, Members(Members::Words{0b011}));
}

}  // namespace
}  // namespace xd::test
