// Mistakes of one rank in a call of all: it gets an error of its own, which names the mistake; all
// others at once MISMATCH, which names that rank; nothing is written, and the handle goes on.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "conformance/families/family.h"
#include "conformance/said.h"

namespace xd::test {

// The highest rank makes the mistake; a launch with one rank has no peers to tell.
inline int guilty_rank(const Rank& rank) { return rank.num_ranks - 1; }
inline bool is_guilty(const Rank& rank) { return rank.rank == guilty_rank(rank); }

// The texts that all ranks must be told when a call of `guilty` fails with `status` for a reason of
// its own.
struct Blame {
  int guilty;
  Words words;  // the guilty rank's text has all of these
  Words any{};  // and one of these, if there are any
  xd_status status = XD_ERROR_INVALID_ARGUMENT;
};

template <class Status>
void expect_blamed(const Rank& rank, const OutcomeOf<Status>& outcome, const Blame& blame) {
  EXPECT_EQ(outcome.met.status, outcome.status) << outcome.met.text;
  if (rank.rank != blame.guilty) {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_EQ(outcome.met.rank, blame.guilty);
    return expect_words(outcome.text, {"rank " + std::to_string(blame.guilty)});
  }
  EXPECT_EQ(outcome, blame.status);
  expect_words(outcome.text, blame.words);
  bool found = blame.any.empty();
  for (const std::string& word : blame.any) found = found || outcome.mentions(word);
  EXPECT_TRUE(found) << "expected one of " << testing::PrintToString(blame.any)
                     << " in: " << outcome.text;
}

// Where rank 0 differs from all others, every rank is told of the lowest rank that is not as it is
// itself.
template <class Status>
void expect_disagreement(const Rank& rank, const OutcomeOf<Status>& outcome) {
  EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
  EXPECT_EQ(outcome.met.status, XD_ERROR_MISMATCH);
  const int lowest = rank.rank == 0 ? 1 : 0;
  EXPECT_EQ(outcome.met.rank, lowest) << outcome.met.text;
  expect_words(outcome.text, {"rank " + std::to_string(lowest)});
}

// Writes a value that the type may not have: C++ code may not make one by itself.
template <class Enum>
void force(Enum& field, int value) {
  std::memcpy(&field, &value, sizeof(value));
}

// A handle, and a batch whose arguments are made wrong one after another.
template <class F>
class Scene {
 public:
  using Operation = typename F::Operation;
  using Make = void (*)(Scene&);

  // `of`: this rank's case; `more`: what else its batch is made from.
  template <class... More>
  Scene(const Rank& on, typename F::Raw* to, const typename F::Case& of, More... more)
      : rank(on), handle(to), c(of), batch(on, of, 0, more...) {}

  // Tensors and numbers that last until the mistake has been made good.
  const DLTensor* tensor(DLDataType type, std::vector<std::int64_t> shape) {
    return tensors_.emplace_back(rank, type, std::move(shape)).dl();
  }
  const DLTensor* like(const DLTensor* other, DLDataType type) {
    return tensor(type, {other->shape, other->shape + other->ndim});
  }
  const std::int64_t* numbers(std::vector<std::int64_t> values) {
    return numbers_.emplace_back(std::move(values)).data();
  }
  // A copy of what the slot points to, which takes its place.
  DamagedTensor& damage(const DLTensor*& slot) {
    DamagedTensor& damaged = damaged_.emplace_back(*slot);
    slot = &damaged.tensor;
    return damaged;
  }

  // Makes the call, with a plan where it needs one, and expects that no rank waits for long.
  auto call(Operation operation, Way way = Way::whole) {
    prepare_for(operation);
    ++calls_[F::sequence_of(operation)];
    const auto start = std::chrono::steady_clock::now();
    auto outcome = finish(rank, handle, F::enqueue(batch, handle, operation, way));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10))
        << "waited for the timeout";
    if (F::makes_plan(operation)) has_plan_ = outcome == XD_SUCCESS;
    return outcome;
  }
  // The same, given up by this rank.
  auto join_failed(Operation operation, const char* why) {
    ++calls_[F::sequence_of(operation)];
    return finish(rank, handle, F::join_failed(handle, operation, why, rank.stream()));
  }
  // Says that the batch has a plan already.
  void has_plan() { has_plan_ = true; }
  // Leaves a plan where the operation needs one. All ranks call it alike.
  void prepare_for(Operation operation) {
    if (F::makes_plan(operation) || has_plan_) return;
    F::make_plan(batch, handle);
    ++calls_[0];
    has_plan_ = true;
  }
  // How many operations of a sequence there have been, those that made plans included.
  std::uint64_t calls_in(std::size_t sequence) const { return calls_[sequence]; }

  // Makes the call, wrong as `make` makes it on the guilty rank.
  template <class Wrong>
  void expect_refused(Operation operation, const Words& words, Wrong&& make,
                      xd_status status = XD_ERROR_INVALID_ARGUMENT, const Words& any = {}) {
    prepare_for(operation);
    const auto good = std::apply([](const auto&... a) { return std::tuple(a...); }, F::args(batch));
    if (is_guilty(rank)) make(*this);
    expect_blamed(rank, call(operation), {guilty_rank(rank), words, any, status});
    F::expect_nothing_written(batch, operation);
    F::args(batch) = good;
    tensors_.clear();
    numbers_.clear();
    damaged_.clear();
  }

  const Rank& rank;
  typename F::Raw* const handle;
  const typename F::Case c;
  typename F::Batch batch;

 private:
  bool has_plan_ = !F::makes_plan(F::kFirst);  // where there are none, none is wanting
  std::uint64_t calls_[2]{};
  std::deque<Tensor> tensors_;
  std::deque<std::vector<std::int64_t>> numbers_;
  std::deque<DamagedTensor> damaged_;
};

// A mistake, and what the guilty rank's text must have.
template <class F>
struct Mistake {
  Words words;
  void (*make)(Scene<F>&);
};

// Every mistake in a call of `operation`.
template <class F>
void expect_mistakes(const typename F::Case& c, typename F::Operation operation,
                     const std::vector<Mistake<F>>& mistakes,
                     xd_status status = XD_ERROR_INVALID_ARGUMENT) {
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE(c.description());
    const auto handle = F::make(rank, c);
    {
      Scene<F> scene(rank, handle.get(), c);
      for (const Mistake<F>& mistake : mistakes) {
        SCOPED_TRACE("expects " + testing::PrintToString(mistake.words));
        scene.expect_refused(operation, mistake.words, mistake.make, status);
      }
    }
    F::expect_works(rank, c, handle.get());
  });
}

}  // namespace xd::test
