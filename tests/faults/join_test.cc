// A killed rank's place is taken by another process, while the others work: what they compute is
// right before, without the rank, and with its successor, and nothing piles up.
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <iostream>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "base/math.h"
#include "conformance/said.h"
#include "faults/hex.h"
#include "faults/join_program.h"
#include "faults/processes.h"
#include "support/memory.h"

namespace xd::test {
namespace {

constexpr int kLongMs = 60000;

RankProgram joining() {
  RankProgram program;
  program.program = Program::join;
  program.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
  program.timeout_ms = kLongMs;
  program.wait_timeout_ms = kLongMs;
  return program;
}

// A communicator, and what the test knows of it.
class Ranks {
 public:
  explicit Ranks(int num_ranks, const RankProgram& program = joining())
      : num_ranks_(num_ranks), processes_(program, each(num_ranks)) {
    processes_.wait_until_all_are_ready();
  }

  Processes& processes() { return processes_; }
  std::vector<int> others(const std::vector<int>& some) const {
    std::vector<int> ranks;
    for (int r = 0; r < num_ranks_; ++r)
      if (std::ranges::find(some, r) == some.end()) ranks.push_back(r);
    return ranks;
  }
  std::vector<int> others(int rank) const { return others(std::vector<int>{rank}); }
  std::vector<int> all() const { return others(-1); }

  void tell(const std::vector<int>& ranks, const std::string& line) {
    for (const int rank : ranks) processes_.tell(rank, line);
  }
  void steps(const std::vector<int>& ranks, int count, const std::string& lost) {
    tell(ranks, "steps " + std::to_string(number_) + " " + std::to_string(count) + " " + lost);
    for (const int rank : ranks) processes_.wait_until_done(rank);
    number_ += count;
  }
  void run(const std::vector<int>& ranks) {
    tell(ranks, "run " + std::to_string(number_));
    number_ += 100000;
  }
  // All see the loss; each by its own operation, which may be the next one.
  void expect_losses(const std::vector<int>& ranks, int victim) {
    for (const int rank : ranks) {
      const Result result = processes_.wait_for_result(rank);
      EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
      expect_words(result.text, {"rank " + std::to_string(victim)});
    }
  }
  // The view that all get, or the empty text if they differ.
  std::string agree(const std::vector<int>& ranks) {
    tell(ranks, "agree " + std::to_string(kLongMs));
    return views_of(ranks);
  }
  std::string views_of(const std::vector<int>& ranks) {
    std::string view;
    for (const int rank : ranks) {
      const Result result = processes_.wait_for_result(rank);
      EXPECT_EQ(result.status, XD_SUCCESS) << "rank " << rank << ": " << result.text;
      const std::string members = result.text.substr(0, result.text.find(" joined"));
      if (rank != ranks[0]) {
        EXPECT_EQ(members, view);
      }
      view = members;
    }
    return view;
  }
  xd_unique_id invitation(int rank) {
    processes_.tell(rank, "invite");
    const Result result = processes_.wait_for_result(rank);
    EXPECT_EQ(result.status, XD_SUCCESS) << result.text;
    return from_hex<xd_unique_id>(result.text.substr(1));
  }
  void start_joiner(int place, const xd_unique_id& invitation, int wanted,
                    RankProgram program = joining()) {
    program.num_ranks = num_ranks_;
    program.joins = true;
    program.id = invitation;
    program.wanted = wanted;
    program.ranks = {place};
    processes_.restart(program);
    processes_.wait_until_it_joins(place);
  }
  // The members look for the guest in each of their views, as schedulers do between steps.
  void take_in(const std::vector<int>& guests) { take_in(guests, others(guests)); }
  void take_in(const std::vector<int>& guests, std::vector<int> members) {
    tell(guests, "agree " + std::to_string(kLongMs));
    // The first of the guests may be in, and is to be asked as the others then.
    std::vector<int> waiting = guests;
    while (!waiting.empty()) {
      const std::string view = agree(members);
      if (testing::Test::HasFailure()) return;
      for (const int guest : std::vector<int>(waiting)) {
        if (!has(view, guest)) continue;
        EXPECT_EQ(views_of({guest}), view);
        std::erase(waiting, guest);
        members.push_back(guest);
      }
    }
  }
  std::string resources(int rank) {
    processes_.tell(rank, "resources");
    return processes_.wait_for_result(rank).text;
  }
  // Connections that have ended may be closed a moment later.
  void expect_resources(int rank, const std::string& wanted) {
    const auto end = Clock::now() + std::chrono::seconds(20);
    std::string found;
    while ((found = resources(rank)) != wanted && Clock::now() < end) {
    }
    EXPECT_EQ(found, wanted) << "rank " << rank;
  }

 private:
  static std::vector<std::vector<int>> each(int num_ranks) {
    std::vector<std::vector<int>> processes;
    for (int r = 0; r < num_ranks; ++r) processes.push_back({r});
    return processes;
  }
  static bool has(const std::string& view, int rank) {
    const std::string members = view.substr(view.find(':') + 1) + ",";
    return ("," + members).find("," + std::to_string(rank) + ",") != std::string::npos;
  }
  const int num_ranks_;
  Processes processes_;
  int number_ = 0;
};

// The descriptors of a process, and the rest of its resources. Of a place that is taken again it
// keeps the first connection and process, beside the latest.
struct Held {
  std::size_t descriptors = 0;
  std::string rest;
  std::set<int> replaced;

  static Held of(const std::string& text) {
    std::size_t digits = 0;
    const std::size_t descriptors = std::stoul(text, &digits);
    return {descriptors, text.substr(digits), {}};
  }
  std::string text() const {
    return " " + std::to_string(descriptors + 2 * replaced.size()) + rest;
  }
};

enum class Moment { between_calls, in_steps, between_halves, in_agree };
constexpr int kMoments = 4;

// Kills the rank, and brings the others to the view without it.
void lose(Ranks& ranks, int victim, Moment moment) {
  const std::vector<int> others = ranks.others(victim);
  switch (moment) {
    case Moment::between_calls:
      ranks.processes().kill(victim);
      ranks.run(others);
      break;
    case Moment::in_steps:
      ranks.run(ranks.all());
      for (const int rank : ranks.all()) ranks.processes().wait_for_progress(rank);
      ranks.processes().kill(victim);
      break;
    case Moment::between_halves:
      ranks.processes().tell(victim, "send 7");
      ranks.processes().wait_until_done(victim);
      ranks.processes().kill(victim);
      ranks.run(others);
      break;
    case Moment::in_agree:
      ranks.tell(others, "agree " + std::to_string(kLongMs));
      ranks.processes().kill(victim);
      ranks.views_of(others);
      return;
  }
  ranks.expect_losses(others, victim);
  ranks.agree(others);
}

void kill_and_replace(int loops) {
  constexpr int kRanks = 4;
  const unsigned seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  const auto draw = [&](int count) {
    return static_cast<int>(random() % static_cast<unsigned>(count));
  };
  Ranks ranks(kRanks);
  ranks.steps(ranks.all(), 3, "-");
  std::vector<Held> held;
  for (const int rank : ranks.all()) held.push_back(Held::of(ranks.resources(rank)));
  for (int loop = 0; loop < loops; ++loop) {
    const int victim = loop < kRanks ? loop : draw(kRanks);
    const auto moment = static_cast<Moment>(loop < kMoments ? loop : draw(kMoments));
    SCOPED_TRACE("loop " + std::to_string(loop) + ": rank " + std::to_string(victim) + ", moment " +
                 std::to_string(static_cast<int>(moment)));
    const std::vector<int> others = ranks.others(victim);
    lose(ranks, victim, moment);
    const std::string lost = std::to_string(victim);
    ranks.steps(others, 3, lost);
    ranks.start_joiner(victim, ranks.invitation(others[at(draw(kRanks - 1))]),
                       draw(2) == 0 ? -1 : victim);
    ranks.steps(others, 20, lost);  // while it joins
    ranks.processes().wait_until_ready(victim);
    ranks.tell({victim}, "alone 2");
    ranks.processes().wait_until_done(victim);
    ranks.steps(others, 3, lost);
    ranks.take_in({victim});
    ranks.steps(ranks.all(), 5, "-");
    if (testing::Test::HasFailure()) return;
    held[at(victim)] = Held::of(ranks.resources(victim));
    for (const int rank : others) {
      held[at(rank)].replaced.insert(victim);
      ranks.expect_resources(rank, held[at(rank)].text());
    }
  }
  for (const int rank : ranks.all()) ranks.processes().tell(rank, "end");
  for (const int rank : ranks.all()) EXPECT_EQ(ranks.processes().wait_for_after(rank), "clean");
}

// Elastic communicators are refused for other executors.
class Join : public testing::Test {
 protected:
  void SetUp() override {
    if (executor() != "cpu") GTEST_SKIP() << "ranks on devices cannot be joined yet";
  }
};
class LongJoin : public Join {};
class JoinRefused : public Join {};

TEST_F(Join, KilledRanksAreReplacedAgainAndAgain) { kill_and_replace(12); }
TEST_F(LongJoin, KilledRanksAreReplacedAgainAndAgain) { kill_and_replace(200); }

// ---- Ranks that are not let in, or not taken in -------------------------------------------------

// Kills the rank, brings the others to the view without it, and gives an invitation of theirs.
xd_unique_id lose_and_invite(Ranks& ranks, int victim) {
  lose(ranks, victim, Moment::in_steps);
  return ranks.invitation(ranks.others(victim)[0]);
}

TEST_F(JoinRefused, AGroupOfAnotherConfigNamesTheField) {
  Ranks ranks(3);
  const xd_unique_id invitation = lose_and_invite(ranks, 1);
  RankProgram other = joining();
  other.wait_timeout_ms = 1234;
  ranks.start_joiner(1, invitation, 1, other);
  expect_words(ranks.processes().wait_for_after(1),
               {"config.wait_timeout_ms = 1234, expected " + std::to_string(kLongMs)});
  ranks.processes().kill(1);
  ranks.start_joiner(1, invitation, 1);
  ranks.processes().wait_until_ready(1);
  ranks.take_in({1});
  ranks.steps(ranks.all(), 5, "-");
}

TEST_F(JoinRefused, CallsThatNeedAllRanksAreUnsupportedAndFinishNothing) {
  Ranks ranks(3);
  ranks.start_joiner(2, lose_and_invite(ranks, 2), 2);
  ranks.processes().wait_until_ready(2);
  ranks.take_in({2});
  ranks.tell(ranks.all(), "refused");
  for (const int rank : ranks.all()) {
    for (int i = 0; i < 6; ++i) {
      const Result result = ranks.processes().wait_for_result(rank);
      EXPECT_EQ(result.status, XD_ERROR_UNSUPPORTED) << result.text;
    }
  }
  ranks.steps(ranks.all(), 5, "-");
}

TEST_F(JoinRefused, AGuestThatDiesIsLostAndReplaced) {
  Ranks ranks(3);
  const xd_unique_id invitation = lose_and_invite(ranks, 0);
  for (int i = 0; i < 3; ++i) {
    ranks.start_joiner(0, invitation, 0);
    ranks.processes().wait_until_ready(0);
    ranks.processes().tell(1, "lost");
    EXPECT_EQ(ranks.processes().wait_for_losses(1).ranks, "-");
    ranks.processes().kill(0);
    ranks.steps(ranks.others(0), 3, "0");
  }
  ranks.start_joiner(0, invitation, -1);
  ranks.processes().wait_until_ready(0);
  ranks.take_in({0});
  ranks.steps(ranks.all(), 5, "-");
}

// At any time while it joins.
TEST_F(JoinRefused, AProcessThatDiesWhileItJoinsLeavesNothing) {
  Ranks ranks(3);
  const xd_unique_id invitation = lose_and_invite(ranks, 1);
  const Held before = Held::of(ranks.resources(0));
  for (int i = 0; i < 20; ++i) {
    ranks.start_joiner(1, invitation, 1);
    ranks.steps(ranks.others(1), 1 + 3 * i, "1");  // as a clock
    ranks.processes().kill(1);
  }
  ranks.start_joiner(1, invitation, 1);
  ranks.processes().wait_until_ready(1);
  Held after = before;
  after.replaced.insert(1);
  ranks.expect_resources(0, after.text());
  ranks.take_in({1});
  ranks.steps(ranks.all(), 5, "-");
}

TEST_F(Join, TwoPlacesAreTakenAtOnce) {
  Ranks ranks(4);
  lose(ranks, 3, Moment::in_steps);
  ranks.processes().kill(1);
  ranks.run({0, 2});
  ranks.expect_losses({0, 2}, 1);
  ranks.agree({0, 2});
  ranks.start_joiner(1, ranks.invitation(0), 1);
  ranks.start_joiner(3, ranks.invitation(2), 3);
  ranks.steps({0, 2}, 20, "1,3");
  for (const int rank : {1, 3}) ranks.processes().wait_until_ready(rank);
  ranks.take_in({1, 3});
  ranks.steps(ranks.all(), 5, "-");
  // Ranks that came later let others in as those from the beginning do.
  for (const int rank : {0, 2}) {
    lose(ranks, rank, Moment::in_steps);
    ranks.start_joiner(rank, ranks.invitation(1), rank);
    ranks.processes().wait_until_ready(rank);
    ranks.take_in({rank});
    ranks.steps(ranks.all(), 5, "-");
  }
}

// A group of many tokens goes on without each place that was taken anew, beside a low-latency group
// that goes on with it: in one communicator, by the same views.
TEST_F(Join, GroupsThatResumeGoOnBesideAGuest) {
  RankProgram program = joining();
  program.resumes = true;
  Ranks ranks(4, program);
  ranks.steps(ranks.all(), 2, "-");
  for (const int rank : {2, 0}) {
    lose(ranks, rank, Moment::in_steps);
    ranks.steps(ranks.others(rank), 2, std::to_string(rank));
    ranks.start_joiner(rank, ranks.invitation(1), rank);
    ranks.processes().wait_until_ready(rank);
    ranks.take_in({rank});
    ranks.steps(ranks.all(), 2, "-");
  }
}

// It may be in the middle of what it says to one of them, surely so where one of them stands still
// and keeps it from coming to its end. It is the guest of those that are left, perhaps at its
// second try; or it fails, and another process joins them.
void kill_two_while_one_joins(int loops) {
  constexpr int kRanks = 5;
  const unsigned seed = std::random_device()();
  std::cout << "seed " << seed << "\n";
  std::mt19937 random(seed);
  Ranks ranks(kRanks);
  for (int loop = 0; loop < loops; ++loop) {
    std::vector<int> drawn = ranks.all();
    std::ranges::shuffle(drawn, random);
    const int joins = drawn[0];
    const std::vector<int> dead{drawn[1], drawn[2]};
    const std::vector<int> left{drawn[3], drawn[4]};
    const auto clock = static_cast<int>(random() % 40);
    const bool is_held_up = loop % 2 == 0;
    SCOPED_TRACE("loop " + std::to_string(loop) + ": " + testing::PrintToString(drawn) + ", " +
                 std::to_string(clock) + (is_held_up ? " times 5 ms" : " steps"));
    lose(ranks, joins, Moment::in_steps);
    const xd_unique_id invitation = ranks.invitation(drawn[1 + random() % 4]);
    if (is_held_up) ranks.processes().stop(dead[0]);
    ranks.start_joiner(joins, invitation, joins);
    if (is_held_up) {
      std::this_thread::sleep_for(std::chrono::milliseconds(5 * clock));
    } else {
      ranks.steps(ranks.others(joins), 1 + clock, std::to_string(joins));
    }
    for (const int rank : dead) ranks.processes().kill(rank);
    ranks.run(left);
    for (const int rank : left) {
      const Result result = ranks.processes().wait_for_result(rank);
      EXPECT_EQ(result.status, XD_ERROR_PEER_LOST) << result.text;
    }
    ranks.agree(left);
    const Result first = ranks.processes().wait_until_ready_or_refused(joins);
    if (first.status != XD_SUCCESS) {
      std::cout << "loop " << loop << ": " << first.text << "\n";
      ASSERT_EQ(first.status, XD_ERROR_PEER_LOST) << first.text;
      ranks.start_joiner(joins, ranks.invitation(left[random() % 2]), joins);
      ranks.processes().wait_until_ready(joins);  // nobody else dies
    }
    ranks.take_in({joins}, left);
    ranks.steps({joins, left[0], left[1]}, 3,
                std::to_string(dead[0]) + "," + std::to_string(dead[1]));
    for (const int rank : dead) ranks.start_joiner(rank, ranks.invitation(joins), rank);
    for (const int rank : dead) ranks.processes().wait_until_ready(rank);
    ranks.take_in(dead);
    ranks.steps(ranks.all(), 5, "-");
    if (testing::Test::HasFailure()) return;
  }
}

TEST_F(Join, TwoOthersMayDieWhileAProcessJoins) { kill_two_while_one_joins(5); }
TEST_F(LongJoin, TwoOthersMayDieWhileAProcessJoins) { kill_two_while_one_joins(100); }

}  // namespace
}  // namespace xd::test
