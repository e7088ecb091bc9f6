// Each rank makes its halves in an order of its own, and some of its calls fail: whatever these
// orders are, as long as no rank waits for a half that comes behind its own wait, all of them end,
// and end right.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "conformance/dimensions.h"
#include "conformance/slots/batch.h"
#include "support/gtest_main.h"
#include "support/random.h"

namespace xd::test {
namespace {

enum Kind : int { dispatch, combine };

// A call: a half, or both, of the n-th dispatch or combine.
struct Step {
  Kind kind;
  int n;
  xd_ll_phase phase;
};
using Order = std::vector<Step>;

// The mistake of one rank in an operation.
struct Fault {
  enum How { none, send, plan, receive } how = none;
  int rank = -1;

  // A send half with a mistake is the whole operation. A bad plan is one that only the kernel sees.
  bool fails_send_of(int r) const { return r == rank && (how == send || how == plan); }
  bool fails_receive_of(int r) const { return r == rank && how == receive; }
};

struct Program {
  int batches, in_flight;
  bool weighted;                             // combine has weights
  std::array<std::vector<Fault>, 2> faults;  // by kind and number
  std::vector<int> combined;                 // by number of the combine: its batch
  std::vector<Order> orders;                 // by rank

  Program(int batch_count, int most_in_flight, bool has_weights)
      : batches(batch_count), in_flight(most_in_flight), weighted(has_weights) {
    faults[dispatch].resize(static_cast<std::size_t>(batches));
    faults[combine].resize(static_cast<std::size_t>(batches));
  }
  // Batches whose dispatch has delivered on all ranks are combined.
  void choose_combined() {
    combined.clear();
    for (int batch = 0; batch < batches; ++batch) {
      if (fault(dispatch, batch).how == Fault::none) combined.push_back(batch);
    }
  }
  Fault& fault(int kind, int n) {
    return faults[static_cast<std::size_t>(kind)][static_cast<std::size_t>(n)];
  }
  const Fault& fault(int kind, int n) const {
    return faults[static_cast<std::size_t>(kind)][static_cast<std::size_t>(n)];
  }
  int operations(int kind) const {
    return kind == dispatch ? batches : static_cast<int>(combined.size());
  }
  int batch_of(const Step& step) const {
    return step.kind == dispatch ? step.n : combined[static_cast<std::size_t>(step.n)];
  }
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

// A send half waits for its place, which the receive half `in_flight` operations before it frees on
// all ranks; then, with weights, for those of all ranks. True if this part of the step is over, or
// has come further.
bool send(const Program& program, std::vector<Progress>& ranks, std::size_t r, const Step& step) {
  Progress& own = ranks[r];
  const int n = step.n;
  const auto kind = static_cast<std::size_t>(step.kind);
  const auto is_free = [&](const Progress& p) { return p.taken[kind] > n - program.in_flight; };
  if (!own.begun && !holds_for_all(ranks, is_free)) return false;
  const bool was_begun = std::exchange(own.begun, true);
  own.began[kind] = n + 1;
  const bool fails = program.fault(step.kind, n).fails_send_of(static_cast<int>(r));
  const auto has_weights = [&](const Progress& p) { return p.began[kind] > n; };
  if (step.kind == combine && program.weighted && !fails && !holds_for_all(ranks, has_weights)) {
    return !was_begun;
  }
  own.sent[kind] = n + 1;
  return true;
}

// Between machines a receive half takes in what has been sent to it, whatever its arguments are.
bool bad_receive_waits() { return std::getenv("XD_NET_TEST") != nullptr; }

// A receive half waits for all send halves; one with a mistake, for nothing.
bool receive(const Program& program, std::vector<Progress>& ranks, std::size_t r,
             const Step& step) {
  const auto kind = static_cast<std::size_t>(step.kind);
  const auto has_sent = [&](const Progress& p) { return p.began[kind] > step.n; };
  const bool fails = program.fault(step.kind, step.n).fails_receive_of(static_cast<int>(r));
  if ((!fails || bad_receive_waits()) && !holds_for_all(ranks, has_sent)) return false;
  ranks[r].taken[kind] = step.n + 1;
  return true;
}

// One part of a rank's next step, if nothing that it waits for is missing.
bool advance(const Program& program, std::vector<Progress>& ranks, std::size_t r) {
  Progress& own = ranks[r];
  if (own.next == program.orders[r].size()) return false;
  const Step& step = program.orders[r][own.next];
  const auto kind = static_cast<std::size_t>(step.kind);
  const bool sends = step.phase != XD_LL_PHASE_RECEIVE && own.sent[kind] == step.n;
  if (!(sends ? send : receive)(program, ranks, r, step)) return false;
  const auto fails = [&](int n) {
    return program.fault(step.kind, n).fails_send_of(static_cast<int>(r));
  };
  // Operations whose send half has failed are taken with those before them.
  while (own.taken[kind] < own.sent[kind] && fails(own.taken[kind])) ++own.taken[kind];
  const bool is_over =
      sends ? own.sent[kind] > step.n && (step.phase == XD_LL_PHASE_SEND || fails(step.n))
            : own.taken[kind] > step.n;
  if (!is_over) return true;
  own.begun = false;
  ++own.next;
  return true;
}

// True if every rank comes to its end. Nothing that a rank waits for is ever taken back, so it does
// not matter who goes first.
bool ends(const Program& program) {
  std::vector<Progress> ranks(program.orders.size());
  for (bool moves = true; moves;) {
    moves = false;
    for (std::size_t r = 0; r < ranks.size(); ++r) moves |= advance(program, ranks, r);
  }
  for (std::size_t r = 0; r < ranks.size(); ++r) {
    if (ranks[r].next != program.orders[r].size()) return false;
  }
  return true;
}

// ---- Programs ----------------------------------------------------------------------------------

// The steps that a rank may make next: at most `in_flight` operations of a kind are between their
// halves, receive halves keep the order of their send halves, and a batch's combine needs its plan.
std::vector<Step> possible_steps(const Program& program, const Progress& at, int rank) {
  std::vector<Step> steps;
  for (const Kind kind : {dispatch, combine}) {
    const auto k = static_cast<std::size_t>(kind);
    const int open = at.sent[k] - at.taken[k], n = at.sent[k];
    const bool has_plan = kind == dispatch || n == program.operations(kind) ||
                          at.taken[dispatch] > program.combined[static_cast<std::size_t>(n)];
    if (n < program.operations(kind) && has_plan && open < program.in_flight) {
      steps.push_back({kind, n, XD_LL_PHASE_SEND});
      // A whole call with a bad output fails as a whole, which is another fault.
      if (open == 0 && !program.fault(kind, n).fails_receive_of(rank)) {
        steps.push_back({kind, n, XD_LL_PHASE_BOTH});
      }
    }
    if (open > 0) steps.push_back({kind, at.taken[k], XD_LL_PHASE_RECEIVE});
  }
  return steps;
}

// Goes on with the rank's step, or chooses one that can go on at once: the order in which ranks are
// asked is one in which the program ends. False: nothing has changed.
bool extend(Program& program, std::vector<Progress>& ranks, std::size_t r, Random& random) {
  Order& order = program.orders[r];
  if (ranks[r].next < order.size()) return advance(program, ranks, r);
  const std::vector<Step> steps = possible_steps(program, ranks[r], static_cast<int>(r));
  if (steps.empty()) return false;
  order.push_back(steps[random.below(steps.size())]);
  if (advance(program, ranks, r)) return true;
  order.pop_back();
  return false;
}

// In one of three operations a rank makes a mistake.
void draw_faults(Program& program, int num_ranks, Random& random) {
  for (const Kind kind : {dispatch, combine}) {
    for (Fault& fault : program.faults[static_cast<std::size_t>(kind)]) {
      if (random.below(3) != 0) continue;
      fault.rank = static_cast<int>(random.below(static_cast<std::uint64_t>(num_ranks)));
      fault.how = kind == combine && random.below(3) == 0 ? Fault::plan
                  : random.below(2) == 0                  ? Fault::send
                                                          : Fault::receive;
    }
  }
}

// All batches' operations; draws again where weights of different operations wait for each other.
Program draw_program(int num_ranks, int in_flight, bool weighted, bool fails, Random& random) {
  const auto count = static_cast<std::size_t>(num_ranks);
  Program program(6, in_flight, weighted);
  if (fails) draw_faults(program, num_ranks, random);
  program.choose_combined();
  const auto is_over = [&](const Progress& p) {
    return p.taken[dispatch] == program.batches && p.taken[combine] == program.operations(combine);
  };
  for (;;) {
    program.orders.assign(count, {});
    std::vector<Progress> ranks(count);
    for (std::size_t idle = 0; idle < 50 * count; ++idle) {
      if (extend(program, ranks, random.below(count), random)) idle = 0;
      if (holds_for_all(ranks, is_over)) return program;
    }
  }
}

// "D0s D1s! D0r C0 ...", as a failure is told: the number is the batch, and ! marks a mistake.
std::string text_of(const Program& program, int rank) {
  std::string text;
  for (const Step& step : program.orders[static_cast<std::size_t>(rank)]) {
    text += step.kind == dispatch ? " D" : " C";
    text += std::to_string(program.batch_of(step));
    if (step.phase == XD_LL_PHASE_SEND) text += "s";
    if (step.phase == XD_LL_PHASE_RECEIVE) text += "r";
    const Fault& fault = program.fault(step.kind, step.n);
    if (step.phase == XD_LL_PHASE_RECEIVE ? fault.fails_receive_of(rank)
                                          : fault.fails_send_of(rank)) {
      text += "!";
    }
  }
  return text;
}

Order order_of(const Program& program, const std::string& text) {
  Order order;
  for (std::size_t at = 0; at + 1 < text.size(); ++at) {
    if (text[at] != 'D' && text[at] != 'C') continue;
    const Kind kind = text[at] == 'D' ? dispatch : combine;
    const char half = at + 2 < text.size() ? text[at + 2] : ' ';
    Step step{kind, text[at + 1] - '0',
              half == 's'   ? XD_LL_PHASE_SEND
              : half == 'r' ? XD_LL_PHASE_RECEIVE
                            : XD_LL_PHASE_BOTH};
    for (int n = 0; kind == combine && n < program.operations(combine); ++n) {
      if (program.combined[static_cast<std::size_t>(n)] == text[at + 1] - '0') step.n = n;
    }
    order.push_back(step);
  }
  return order;
}

// ---- Running them ------------------------------------------------------------------------------

// A call with this rank's mistake.
void make_mistake(const Rank& rank, xd_ll_group* group, const LlCase& c, LlBatch& batch,
                  const Step& step, const Fault& fault) {
  const xd_ll_operation operation = step.kind == dispatch ? XD_LL_DISPATCH : XD_LL_COMBINE;
  batch.reset_tensors(operation);
  const std::vector<std::int32_t> owners = c.owners();
  Buffer garbage = make_plan(rank, c.config(owners));
  garbage.fill(kPoison);
  const char* const name = fault.how == Fault::receive
                               ? (step.kind == dispatch ? "recv_tokens" : "out")
                           : step.kind == dispatch ? "tokens"
                                                   : "expert_out";
  const DLTensor** const slot = batch.field(operation, name).slot;
  const DLTensor* const kept = *slot;
  if (fault.how == Fault::plan) {
    batch.use_plan(garbage);
  } else {
    *slot = nullptr;
  }
  EXPECT_EQ(batch.call(group, operation, step.phase), XD_ERROR_INVALID_ARGUMENT);
  *slot = kept;
  batch.use_plan(batch.plan());
  EXPECT_EQ(batch.written(operation), "");
}

// A call that is right, in an operation in which another rank's send half may have failed.
void make_call(xd_ll_group* group, LlBatch& batch, const Step& step, const Fault& fault) {
  const bool fails = fault.how == Fault::send || fault.how == Fault::plan;
  if (!fails || step.phase == XD_LL_PHASE_SEND) {
    step.kind == dispatch ? batch.dispatch(group, step.phase) : batch.combine(group, step.phase);
    return;
  }
  const xd_ll_operation operation = step.kind == dispatch ? XD_LL_DISPATCH : XD_LL_COMBINE;
  EXPECT_EQ(batch.call(group, operation, step.phase), XD_ERROR_MISMATCH);
  EXPECT_EQ(batch.written(operation), "");
}

void run(const Rank& rank, xd_ll_group* group, const LlCase& c, const Program& program) {
  std::string all;
  for (int r = 0; r < rank.num_ranks; ++r) all += "\n " + text_of(program, r);
  SCOPED_TRACE("rank " + std::to_string(rank.rank) + ", orders of the ranks:" + all);
  std::deque<LlBatch> batches;
  for (int number = 0; number < program.batches; ++number) batches.emplace_back(rank, c, number);
  for (const Step& step : program.orders[static_cast<std::size_t>(rank.rank)]) {
    LlBatch& batch = batches[static_cast<std::size_t>(program.batch_of(step))];
    const Fault& fault = program.fault(step.kind, step.n);
    if (step.phase == XD_LL_PHASE_RECEIVE ? fault.fails_receive_of(rank.rank)
                                          : fault.fails_send_of(rank.rank)) {
      make_mistake(rank, group, c, batch, step, fault);
    } else {
      make_call(group, batch, step, fault);
    }
    if (testing::Test::HasFailure()) return;
  }
}

LlCase case_of(int num_ranks, int in_flight, bool weighted) {
  LlCase c = plain_ll_case(num_ranks);
  c.in_flight = in_flight;
  c.weights = weighted ? Weights::at_combine : Weights::at_dispatch;
  return c;
}

// Runs `count` programs of each way.
void run_drawn(bool fails, int count) {
  const int num_ranks = world().num_ranks();
  Random random(mix(test_seed(), static_cast<std::uint64_t>(num_ranks), fails ? 1 : 0));
  for (const int in_flight : {2, 3, 4}) {
    for (const bool weighted : {false, true}) {
      const LlCase c = case_of(num_ranks, in_flight, weighted);
      std::vector<Program> programs;
      for (int i = 0; i < count; ++i) {
        programs.push_back(draw_program(num_ranks, in_flight, weighted, fails, random));
      }
      SCOPED_TRACE("seed " + std::to_string(test_seed()) + ": " + c.description());
      on_every_rank([&](Rank& rank) {
        const LlGroup group = make_group(rank, c);
        for (const Program& program : programs) run(rank, group.get(), c, program);
      });
    }
  }
}

TEST(LlOrders, OfRanksMayDifferAsLongAsNoRankWaitsForWhatComesBehindItsWait) {
  run_drawn(false, full_tests() ? 100 : 12);
}

TEST(LlOrders, OfRanksMayDifferWhereCallsFail) { run_drawn(true, full_tests() ? 200 : 12); }

// Even ranks have one order, odd ones the other.
void run_given(Program program, const std::string& even, const std::string& odd) {
  program.choose_combined();
  for (int r = 0; r < world().num_ranks(); ++r) {
    program.orders.push_back(order_of(program, r % 2 == 0 ? even : odd));
  }
  ASSERT_TRUE(ends(program));
  const LlCase c = case_of(world().num_ranks(), program.in_flight, program.weighted);
  on_every_rank([&](Rank& rank) { run(rank, make_group(rank, c).get(), c, program); });
}

// Every place of dispatch that a rank has freed may be used, while that rank waits in combine: even
// ranks wait there for the weights of odd ones, whose last send half of dispatch comes first.
TEST(LlOrders, APlaceIsFreeWhileItsRankWaitsInTheOtherKind) {
  run_given(Program(5, 3, true), "D0s D1s D0r D2s D1r C0s D3s D4s D2r C0r D3r D4r C1 C2 C3 C4",
            "D0s D1s D2s D0r D3s D1r D4s D2r C0s C0r D3r D4r C1 C2 C3 C4");
}

// The same of a place that was taken together with that of an operation that has failed.
TEST(LlOrders, APlaceIsFreeWhereAFailedOperationWasTakenWithIt) {
  if (world().num_ranks() != 2) GTEST_SKIP() << "one rank of two makes a mistake";
  Program program(4, 2, false);
  program.fault(dispatch, 1) = {Fault::send, 0};
  run_given(program, "D0s D1s D0r C0 D2s D3s D2r D3r C2 C3",
            "D0s D1s D0r D1r D2s D3s C0 D2r D3r C2 C3");
}

// The same of places whose receive halves had bad arguments, and so waited for nobody.
TEST(LlOrders, APlaceIsFreeWhereItsReceiveHalfHadBadArguments) {
  if (world().num_ranks() != 2) GTEST_SKIP() << "one rank of two makes a mistake";
  Program program(5, 2, false);
  program.fault(dispatch, 1) = program.fault(dispatch, 2) = {Fault::receive, 0};
  run_given(program, "D0 D1s D1r D2s D2r C0 D3s D4s D3r D4r C3 C4",
            "D0 D1s D1r D2s D2r D3s D4s C0 D3r D4r C3 C4");
}

}  // namespace
}  // namespace xd::test
