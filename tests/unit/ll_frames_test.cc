// All ways in which kernels of low latency, the threads that have their links, and the network can
// play together: an exhaustive search over the orders of their steps, for ranks that are machines
// of their own. Every program of calls that callers may write comes to its end. Mutants show what
// the search would find.
#include "ep/slots/cuda/remote/frames.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_set>
#include <vector>

#include "base/hash.h"
#include "base/math.h"

namespace xd::ep::cuda {
namespace {

constexpr int kMostRanks = 3, kMostFlight = 2, kMostFrames = kLlRemoteKinds * kMostFlight;

// A half of an operation, as a rank calls it: operations are numbered from 1. A send half that
// fails is the whole operation; a bad receive half waits for nobody.
struct Half {
  enum Kind : std::uint8_t { send, failing_send, receive, bad_receive };
  Kind kind;
  std::uint8_t operation;
};
using Program = std::vector<Half>;

enum class Mutant {
  none,
  only_what_is_here,  // a rank gives up no message before it is here
  only_the_next_use,  // the thread that has the links gives back the use that is named, alone
  weights_for_all,    // also for a rank that needs none
  late_give_up,       // weights without use are given up behind the own ones alone
  sums_for_weights,   // a rank that has sent sums is taken for one without weights
  early_refill        // a frame is filled again without a credit
};

// One kind of operations: combine, whose `sums` are what a dispatch has, with or without weights.
struct Problem {
  std::vector<Program> programs;  // by rank
  std::uint8_t in_flight = 1;
  bool weighs = false;
  Mutant mutant = Mutant::none;
};

// The way of a message through a frame. Words are uses, as in net/commands.h. A message may land,
// and a credit come back, at any time after it has been told of.
struct Frame {
  std::uint8_t filled, freed;  // at the sender
  std::uint8_t landed, read;   // at the receiver
  std::uint8_t held;           // the message that has landed is not given back
  std::uint8_t sent,
      received;  // Message: of the use that is filled, and of the one that has landed
  std::uint8_t unused;
};
// The number of an operation, with a bit that says that it has failed.
using Message = std::uint8_t;
constexpr Message kFailed = 0x80;

struct Kernel {
  std::uint8_t step;  // of the program
  std::uint8_t part;  // of the step: see Search::run_kernel()
  std::uint8_t weights_sent[kMostRanks], weights_read[kMostRanks];
};

struct State {
  Kernel kernels[kMostRanks];
  Frame frames[kMostRanks][kMostRanks][kMostFrames];  // [sender][receiver]
};
static_assert(std::has_unique_object_representations_v<State>);

class Search {
 public:
  explicit Search(const Problem& problem)
      : problem_(problem),
        frames_{problem.in_flight},
        ranks_(static_cast<int>(problem.programs.size())) {}

  // Empty if every order ends well; else what is wrong with one.
  std::string run() {
    std::vector<State> todo{State{}};
    seen_.insert(key(todo.back()));
    while (!todo.empty() && fault_.empty()) {
      const State from = todo.back();
      todo.pop_back();
      bool moved = false;
      const auto go = [&](auto&& step) {
        now_ = from;
        if (!step()) return;
        moved = true;
        if (seen_.insert(key(now_)).second) todo.push_back(now_);
      };
      for (int r = 0; r < ranks_; ++r) {
        go([&] { return run_kernel(r); });
        for (int p = 0; p < ranks_; ++p) {
          for (unsigned f = 0; p != r && f < frames_.of_neighbour(); ++f) {
            go([&] { return land(frame(r, p, f)); });
            go([&] { return give_back(frame(r, p, f)); });
          }
        }
      }
      if (!moved) judge(from);
    }
    return fault_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  // States are told apart by 64 bits of a hash: two of some millions are alike with 10^-6.
  static std::uint64_t key(const State& state) { return hash_bytes(0, &state, sizeof(state)); }
  Frame& frame(int from, int to, unsigned f) { return now_.frames[from][to][f]; }
  Frame& frame(int from, int to, LlRemoteKind kind, std::uint64_t number) {
    return frame(from, to, frames_.frame(kind, number));
  }
  static std::uint64_t word(std::uint8_t use) { return net::frame_word(use, 0); }
  std::uint8_t use(std::uint64_t number) const {
    return static_cast<std::uint8_t>(frames_.use(number));
  }
  bool is(Mutant mutant) const { return problem_.mutant == mutant; }
  void complain(std::string what) {
    if (fault_.empty()) fault_ = std::move(what);
  }

  // ---- The threads that have the links, and the network ----

  bool land(Frame& f) {
    if (f.filled == f.landed) return false;
    if (f.held != 0) complain("a message lands in one that is read");
    f.held = 1;
    f.received = f.sent;
    ++f.landed;
    return true;
  }
  bool give_back(Frame& f) {
    const bool told =
        is(Mutant::only_the_next_use) ? f.read == f.landed : ll_is_told(f.read, f.landed);
    if (f.held == 0 || !told) return false;
    f.held = 0;
    f.freed = f.landed;
    return true;
  }

  // ---- Kernels ----

  bool has_sums(int r, int peer, std::uint64_t operation) {
    return ll_is_here(word(frame(peer, r, LlRemoteKind::sums, operation).landed), use(operation));
  }
  void fill(Frame& f, std::uint64_t number, Message message) {
    if (f.filled != f.landed || f.held != 0) complain("a frame is filled before it is free");
    f.filled = use(number);
    f.sent = message;
  }
  void read(Frame& f, std::uint64_t number) { f.read = use(number); }
  bool may_fill(const Frame& f, std::uint64_t number) const {
    const std::uint64_t freed = word(is(Mutant::early_refill) ? f.filled : f.freed);
    return ll_may_fill(freed, static_cast<std::uint32_t>(use(number)));
  }

  enum class Did { nothing, something, all };

  // True if weights of an operation before this one were here: nobody has a use for them.
  bool give_up_weights(int r, int p, std::uint8_t operation) {
    std::uint8_t& read_so_far = now_.kernels[r].weights_read[p];
    const std::uint64_t number = read_so_far + 1u;
    Frame& f = frame(p, r, LlRemoteKind::combine, number);
    if (!ll_is_here(word(f.landed), frames_.use(number)) || f.received >= operation) return false;
    read(f, number);
    ++read_so_far;
    return true;
  }
  // Weights to one peer, where it is not known to need none: it waits for them before its sums.
  Did post_weights(int r, int p, std::uint8_t operation) {
    std::uint8_t& sent = now_.kernels[r].weights_sent[p];
    const std::uint64_t number = sent + 1u;
    Frame& f = frame(r, p, LlRemoteKind::combine, number);
    if (!is(Mutant::weights_for_all) && has_sums(r, p, operation)) return Did::all;
    if (!is(Mutant::late_give_up) && give_up_weights(r, p, operation)) return Did::something;
    if (!may_fill(f, number)) return Did::nothing;
    fill(f, number, operation);
    ++sent;
    return Did::all;
  }
  // Weights of one peer, or what says that it has none.
  Did land_weights(int r, int p, std::uint8_t operation) {
    if (give_up_weights(r, p, operation)) return Did::something;
    std::uint8_t& read_so_far = now_.kernels[r].weights_read[p];
    const std::uint64_t number = read_so_far + 1u;
    Frame& f = frame(p, r, LlRemoteKind::combine, number);
    if (ll_is_here(word(f.landed), frames_.use(number)) && f.received == operation) {
      read(f, number);
      ++read_so_far;
      return Did::all;
    }
    if (!has_sums(r, p, operation)) return Did::nothing;
    // Its weights may come behind its sums.
    const Message sums = frame(p, r, LlRemoteKind::sums, operation).received;
    if (!is(Mutant::sums_for_weights) && (sums & kFailed) == 0) return Did::nothing;
    if ((sums & kFailed) == 0) complain("a rank goes on without weights that come");
    return Did::all;
  }
  Did post_sums(int r, int p, Message message) {
    const std::uint8_t operation = message & ~kFailed;
    Frame& f = frame(r, p, LlRemoteKind::sums, operation);
    if (!may_fill(f, operation)) return Did::nothing;
    fill(f, operation, message);
    return Did::all;
  }
  Did land_sums(int r, int p, std::uint8_t operation) {
    if (!has_sums(r, p, operation)) return Did::nothing;
    Frame& f = frame(p, r, LlRemoteKind::sums, operation);
    if ((f.received & ~kFailed) != operation) complain("another operation's sums are read");
    read(f, operation);
    return Did::all;
  }
  Did give_up_sums(int r, int p, std::uint8_t operation) {
    if (!is(Mutant::only_what_is_here) || has_sums(r, p, operation))
      read(frame(p, r, LlRemoteKind::sums, operation), operation);
    return Did::all;
  }

  // The parts of a half, each for every peer: a part waits for all of them, in the order of ranks,
  // which is one of the orders in which blocks of a kernel may find them.
  enum class Part { weights_out, weights_in, sums_out, sums_in, give_up };
  std::vector<Part> parts(const Half& half) const {
    switch (half.kind) {
      case Half::send:
        if (problem_.weighs) return {Part::weights_out, Part::weights_in, Part::sums_out};
        return {Part::sums_out};
      case Half::failing_send:
        return {Part::sums_out, Part::give_up};
      case Half::receive:
        return {Part::sums_in};
      case Half::bad_receive:
        return {Part::give_up};
    }
    return {};
  }
  Did do_part(Part part, int r, int p, const Half& half) {
    const std::uint8_t operation = half.operation;
    const bool fails = half.kind == Half::failing_send;
    switch (part) {
      case Part::weights_out:
        return post_weights(r, p, operation);
      case Part::weights_in:
        return land_weights(r, p, operation);
      case Part::sums_out:
        return post_sums(r, p, fails ? operation | kFailed : operation);
      case Part::sums_in:
        return land_sums(r, p, operation);
      case Part::give_up:
        return give_up_sums(r, p, operation);
    }
    return Did::nothing;
  }
  // The next part of a rank's program for its next peer.
  bool run_kernel(int r) {
    Kernel& k = now_.kernels[r];
    const Program& program = problem_.programs[at(r)];
    if (k.step == program.size()) return false;
    const Half& half = program[k.step];
    const std::vector<Part> all = parts(half);
    const int peers = ranks_ - 1;
    const int i = k.part % peers, p = i < r ? i : i + 1;
    const Did did = do_part(all[at(k.part / peers)], r, p, half);
    if (did != Did::all) return did == Did::something;
    if (++k.part == all.size() * at(peers)) {
      k.part = 0;
      ++k.step;
    }
    return true;
  }

  void judge(const State& end) {
    for (int r = 0; r < ranks_; ++r) {
      const Kernel& k = end.kernels[r];
      const Program& program = problem_.programs[at(r)];
      if (k.step < program.size()) {
        return complain("rank " + std::to_string(r) + " waits for good in operation " +
                        std::to_string(program[k.step].operation));
      }
      for (int p = 0; p < ranks_; ++p) {
        for (unsigned f = 0; p != r && f < frames_.of_neighbour(); ++f) {
          const Frame& found = end.frames[r][p][f];
          const bool weights = f < frames_.frame(LlRemoteKind::sums, 1);
          if (!weights && found.freed != found.filled) complain("a frame does not come back");
        }
      }
    }
  }

  const Problem& problem_;
  const LlFrames frames_;
  const int ranks_;
  State now_{};
  std::unordered_set<std::uint64_t> seen_;
  std::string fault_;
};

// Whole calls, or two operations in flight; `outcomes`: of each operation, in base 3.
Program program_of(int operations, bool pipelined, int outcomes) {
  std::vector<Half> sends, receives;
  std::vector<bool> fails;
  for (int n = 1; n <= operations; ++n, outcomes /= 3) {
    const auto number = static_cast<std::uint8_t>(n);
    const int outcome = outcomes % 3;
    fails.push_back(outcome == 1);
    sends.push_back({outcome == 1 ? Half::failing_send : Half::send, number});
    receives.push_back({outcome == 2 ? Half::bad_receive : Half::receive, number});
  }
  Program program;
  const std::size_t ahead = pipelined ? 1 : 0;
  for (std::size_t n = 0; n < sends.size() + ahead; ++n) {
    if (n < sends.size()) program.push_back(sends[n]);
    if (n >= ahead && !fails[n - ahead]) program.push_back(receives[n - ahead]);
  }
  return program;
}

int power_of_3(int n) { return n == 0 ? 1 : 3 * power_of_3(n - 1); }

// The first fault of all programs of two ranks. With weights and two operations in flight there are
// many states: of all programs in which one of the two makes no mistake.
std::string first_fault(int operations, Mutant mutant, std::size_t* states = nullptr) {
  const int outcomes = power_of_3(operations);
  for (const bool weighs : {false, true}) {
    for (const std::uint8_t in_flight : {std::uint8_t{1}, std::uint8_t{2}}) {
      for (const bool pipelined : {false, true}) {
        if (pipelined && in_flight < 2) continue;
        for (int a = 0; a < outcomes; ++a) {
          const int last = weighs && in_flight > 1 ? 0 : a;
          for (int b = 0; b <= last; ++b) {
            const Problem problem{
                {program_of(operations, pipelined, a), program_of(operations, pipelined, b)},
                in_flight,
                weighs,
                mutant};
            Search search(problem);
            const std::string fault = search.run();
            if (states != nullptr) *states += search.states();
            if (fault.empty()) continue;
            return fault + " (weights " + std::to_string(int{weighs}) + ", in flight " +
                   std::to_string(int{in_flight}) + ", pipelined " +
                   std::to_string(int{pipelined}) + ", outcomes " + std::to_string(a) + " and " +
                   std::to_string(b) + ")";
          }
        }
      }
    }
  }
  return {};
}

TEST(LlFrames, FollowFromTheNumbersOfMessages) {
  const LlFrames frames{2};
  EXPECT_EQ(frames.frame(LlRemoteKind::dispatch, 1), 0u);
  EXPECT_EQ(frames.frame(LlRemoteKind::dispatch, 2), 1u);
  EXPECT_EQ(frames.frame(LlRemoteKind::dispatch, 3), 0u);
  EXPECT_EQ(frames.frame(LlRemoteKind::combine, 1), 2u);
  EXPECT_EQ(frames.frame(LlRemoteKind::sums, 4), 5u);
  EXPECT_EQ(frames.use(1), 1u);
  EXPECT_EQ(frames.use(2), 1u);
  EXPECT_EQ(frames.use(3), 2u);
}

TEST(LlFrames, EveryOrderOfTwoRanksEnds) {
  std::size_t states = 0;
  EXPECT_EQ(first_fault(3, Mutant::none, &states), "");
  RecordProperty("states", std::to_string(states));
}

TEST(LlFrames, EveryOrderOfThreeRanksEnds) {
  for (const bool weighs : {false, true}) {
    for (const auto& outcomes : {std::array{0, 0, 0}, std::array{1, 0, 0}, std::array{1, 2, 0}}) {
      Problem problem{{}, 1, weighs};
      const int operations = weighs ? 1 : 2;
      for (const int outcome : outcomes)
        problem.programs.push_back(program_of(operations, false, outcome));
      EXPECT_EQ(Search(problem).run(), "") << "weights " << weighs << ", " << outcomes[0];
    }
  }
}

TEST(LlFrames, TheSearchFindsMistakes) {
  for (const Mutant mutant :
       {Mutant::only_what_is_here, Mutant::only_the_next_use, Mutant::weights_for_all,
        Mutant::late_give_up, Mutant::sums_for_weights, Mutant::early_refill}) {
    const std::string fault = first_fault(3, mutant);
    EXPECT_NE(fault, "") << "mutant " << static_cast<int>(mutant);
  }
}

}  // namespace
}  // namespace xd::ep::cuda
