// Each rank makes its halves in an order of its own: whatever these orders are, as long as no rank
// waits for a half that comes behind its own wait, all of them end, and end right.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "conformance/dimensions.h"
#include "conformance/ll_batch.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

enum Kind : int { dispatch, combine };

// A call: a half, or both, of a batch's dispatch or combine.
struct Step {
  Kind kind;
  int batch;
  xd_ep_phase phase;
};
using Order = std::vector<Step>;

struct Plan {
  int batches, in_flight;
  bool weighted;              // combine has weights
  std::vector<Order> orders;  // by rank
};

// ---- Which programs may be run -----------------------------------------------------------------

// How far a rank has come in each kind, as its peers may wait for it.
struct Progress {
  std::size_t next = 0;        // its next step
  bool begun = false;          // that step has sent its weights
  std::array<int, 2> began{};  // send halves that have sent what they wait for
  std::array<int, 2> sent{};   // send halves that have ended
  std::array<int, 2> taken{};  // receive halves that have ended
};

template <class Holds>
bool holds_for_all(const std::vector<Progress>& ranks, Holds holds) {
  for (const Progress& rank : ranks) {
    if (!holds(rank)) return false;
  }
  return true;
}

// One part of a rank's next step, if nothing that it waits for is missing: a send half waits for
// its place, which the receive half `in_flight` operations before it frees on all ranks; then, with
// weights, for those of all ranks. A receive half waits for all send halves.
bool advance(const Plan& plan, std::vector<Progress>& ranks, std::size_t r) {
  Progress& own = ranks[r];
  if (own.next == plan.orders[r].size()) return false;
  const Step& step = plan.orders[r][own.next];
  const int n = step.batch;
  const auto kind = static_cast<std::size_t>(step.kind);
  if (step.phase != XD_EP_PHASE_RECEIVE && own.sent[kind] == n) {
    const auto is_free = [&](const Progress& p) { return p.taken[kind] > n - plan.in_flight; };
    if (!own.begun && !holds_for_all(ranks, is_free)) return false;
    const bool was_begun = std::exchange(own.begun, true);
    own.began[kind] = n + 1;
    const auto has_weights = [&](const Progress& p) { return p.began[kind] > n; };
    if (step.kind == combine && plan.weighted && !holds_for_all(ranks, has_weights)) {
      return !was_begun;
    }
    own.sent[kind] = n + 1;
  } else {
    const auto has_sent = [&](const Progress& p) { return p.began[kind] > n; };
    if (!holds_for_all(ranks, has_sent)) return false;
    own.taken[kind] = n + 1;
  }
  if (step.phase == XD_EP_PHASE_BOTH && own.taken[kind] <= n) return true;
  own.begun = false;
  ++own.next;
  return true;
}

// True if every rank comes to its end. Nothing that a rank waits for is ever taken back, so it does
// not matter who goes first.
bool ends(const Plan& plan) {
  std::vector<Progress> ranks(plan.orders.size());
  for (bool moves = true; moves;) {
    moves = false;
    for (std::size_t r = 0; r < ranks.size(); ++r) moves |= advance(plan, ranks, r);
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].next != plan.orders[r].size()) return false;
  }
  return true;
}

// ---- Programs ----------------------------------------------------------------------------------

// The steps that a rank may make next: at most `in_flight` operations of a kind are between their
// halves, receive halves keep the order of their send halves, and a batch's combine needs its plan.
std::vector<Step> possible_steps(const Plan& plan, const Progress& at) {
  std::vector<Step> steps;
  for (const Kind kind : {dispatch, combine}) {
    const auto k = static_cast<std::size_t>(kind);
    const int open = at.sent[k] - at.taken[k];
    const int limit = kind == combine ? at.taken[dispatch] : plan.batches;
    if (at.sent[k] < limit && open < plan.in_flight) {
      steps.push_back({kind, at.sent[k], XD_EP_PHASE_SEND});
      if (open == 0) steps.push_back({kind, at.sent[k], XD_EP_PHASE_BOTH});
    }
    if (open > 0) steps.push_back({kind, at.taken[k], XD_EP_PHASE_RECEIVE});
  }
  return steps;
}

// Goes on with the rank's step, or chooses one that can go on at once: the order in which ranks are
// asked is one in which the program ends. False: nothing has changed.
bool extend(Plan& plan, std::vector<Progress>& ranks, std::size_t r, Random& random) {
  Order& order = plan.orders[r];
  if (ranks[r].next < order.size()) return advance(plan, ranks, r);
  const std::vector<Step> steps = possible_steps(plan, ranks[r]);
  if (steps.empty()) return false;
  order.push_back(steps[random.below(steps.size())]);
  if (advance(plan, ranks, r)) return true;
  order.pop_back();
  return false;
}

// All batches' operations; draws again where weights of different operations wait for each other.
Plan draw_plan(int num_ranks, int in_flight, bool weighted, Random& random) {
  const auto count = static_cast<std::size_t>(num_ranks);
  Plan plan{.batches = 6, .in_flight = in_flight, .weighted = weighted, .orders = {}};
  const auto is_over = [&](const Progress& p) { return p.taken[combine] == plan.batches; };
  for (;;) {
    plan.orders.assign(count, {});
    std::vector<Progress> ranks(count);
    for (std::size_t idle = 0; idle < 50 * count; ++idle) {
      if (extend(plan, ranks, random.below(count), random)) idle = 0;
      if (holds_for_all(ranks, is_over)) return plan;
    }
  }
}

// "D0s D1s D0r C0 ...", as a failure is told.
std::string text_of(const Order& order) {
  std::string text;
  for (const Step& step : order) {
    text += step.kind == dispatch ? " D" : " C";
    text += std::to_string(step.batch);
    if (step.phase == XD_EP_PHASE_SEND) text += "s";
    if (step.phase == XD_EP_PHASE_RECEIVE) text += "r";
  }
  return text;
}

Order order_of(const std::string& text) {
  Order order;
  for (std::size_t at = 0; at + 1 < text.size(); ++at) {
    if (text[at] != 'D' && text[at] != 'C') continue;
    const char half = at + 2 < text.size() ? text[at + 2] : ' ';
    order.push_back({text[at] == 'D' ? dispatch : combine, text[at + 1] - '0',
                     half == 's'   ? XD_EP_PHASE_SEND
                     : half == 'r' ? XD_EP_PHASE_RECEIVE
                                   : XD_EP_PHASE_BOTH});
  }
  return order;
}

void run(const Rank& rank, xd_ep_group* group, const LlCase& c, const Plan& plan) {
  std::string all;
  for (const Order& order : plan.orders) all += "\n " + text_of(order);
  SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", orders of the ranks:" + all);
  std::deque<LlBatch> batches;
  for (int number = 0; number < plan.batches; ++number) batches.emplace_back(rank, c, number);
  for (const Step& step : plan.orders[static_cast<std::size_t>(rank.rank)]) {
    LlBatch& batch = batches[static_cast<std::size_t>(step.batch)];
    step.kind == dispatch ? batch.dispatch(group, step.phase) : batch.combine(group, step.phase);
    if (testing::Test::HasFailure()) return;
  }
}

LlCase case_of(int num_ranks, int in_flight, bool weighted) {
  LlCase c = plain_ll_case(num_ranks);
  c.in_flight = in_flight;
  c.weights = weighted ? Weights::at_combine : Weights::at_dispatch;
  return c;
}

TEST(LlOrders, OfRanksMayDifferAsLongAsNoRankWaitsForWhatComesBehindItsWait) {
  const int num_ranks = world().num_ranks();
  Random random(mix(test_seed(), static_cast<std::uint64_t>(num_ranks)));
  for (const int in_flight : {2, 3, 4}) {
    for (const bool weighted : {false, true}) {
      const LlCase c = case_of(num_ranks, in_flight, weighted);
      std::vector<Plan> plans;
      for (int i = 0; i < (full_tests() ? 100 : 12); ++i) {
        plans.push_back(draw_plan(num_ranks, in_flight, weighted, random));
      }
      SCOPED_TRACE("seed " + std::to_string(test_seed()) + ": " + c.description());
      on_every_rank([&](Rank& rank) {
        const Group group = make_group(rank, c);
        for (const Plan& plan : plans) run(rank, group.get(), c, plan);
      });
    }
  }
}

// Every place of dispatch that a rank has freed may be used, while that rank waits in combine: even
// ranks wait there for the weights of odd ones, whose last send half of dispatch comes first.
TEST(LlOrders, APlaceIsFreeWhileItsRankWaitsInTheOtherKind) {
  const int num_ranks = world().num_ranks();
  Plan plan{.batches = 5, .in_flight = 3, .weighted = true, .orders = {}};
  for (int r = 0; r < num_ranks; ++r) {
    plan.orders.push_back(
        order_of(r % 2 == 0 ? "D0s D1s D0r D2s D1r C0s D3s D4s D2r C0r D3r D4r C1 C2 C3 C4"
                            : "D0s D1s D2s D0r D3s D1r D4s D2r C0s C0r D3r D4r C1 C2 C3 C4"));
  }
  ASSERT_TRUE(ends(plan));
  const LlCase c = case_of(num_ranks, plan.in_flight, plan.weighted);
  on_every_rank([&](Rank& rank) { run(rank, make_group(rank, c).get(), c, plan); });
}

}  // namespace
}  // namespace xd::test
