// Low-latency groups that leave ranks out by hand: results without them, and their way back. (Ranks
// that are late or die: see ../faults.)
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <string>
#include <thread>
#include <vector>

#include "conformance/said.h"
#include "conformance/slots/batch.h"
#include "conformance/slots/echo.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

class Masking {
 public:
  Masking(const Rank& rank, const LlCase& c) : rank_(rank) {
    const std::vector<std::int32_t> owners = c.owners();
    xd_ll_config config = c.config(owners);
    config.on_peer_loss = XD_LL_PEER_LOSS_MASK;
    group_ = make_group(rank.comm, config);
  }

  xd_ll_group* group() const { return group_.get(); }
  void mask(int rank, bool masked) {
    ok(xd_ll_mask_set(group(), rank, masked ? 1 : 0, rank_.stream()));
  }
  std::vector<std::int32_t> masks() const {
    Tensor mask(rank_, kI32, {rank_.num_ranks});
    ok(finish(rank_, group(), xd_ll_mask_get(group(), mask.dl(), rank_.stream())));
    return mask.read_as<std::int32_t>();
  }
  void mask_all(const std::vector<bool>& ranks, bool masked) {
    for (int peer = 0; peer < rank_.num_ranks; ++peer) {
      if (ranks[static_cast<std::size_t>(peer)]) mask(peer, masked);
    }
  }
  xd_ll_status status() const { return group_status(group()); }
  void reset() { ok(finish(rank_, group(), xd_ll_reset(group(), rank_.stream()))); }

 private:
  const Rank& rank_;
  LlGroup group_;
};

std::vector<std::int32_t> numbers(const std::vector<bool>& flags) {
  return {flags.begin(), flags.end()};
}

void expect_ranks(const std::uint64_t (&found)[2], const std::vector<bool>& flags) {
  std::uint64_t wanted[2] = {};
  for (std::size_t i = 0; i < flags.size(); ++i) {
    wanted[i / 64] |= std::uint64_t{flags[i]} << i % 64;
  }
  EXPECT_EQ(found[0], wanted[0]);
  EXPECT_EQ(found[1], wanted[1]);
}

// Any number of steps without the absent ranks, checked.
void step(const Rank& rank, const LlCase& c, xd_ll_group* group, const std::vector<bool>& absent,
          int count) {
  for (int number = 0; number < count; ++number) {
    LlBatch batch(rank, c, number, absent);
    batch.dispatch(group);
    batch.combine(group);
  }
}

LlCase masked_case() {
  LlCase c = plain_ll_case(world().num_ranks());
  c.tokens = Tokens::differ;
  return c;
}

// The ranks fall apart into two parts that do not know of each other, and come together again.
void splits_and_comes_together(const LlCase& c) {
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    const std::vector<bool> none(static_cast<std::size_t>(rank.num_ranks));
    std::vector<bool> others = none;
    for (int peer = 0; peer < rank.num_ranks; ++peer) {
      others[static_cast<std::size_t>(peer)] = peer % 2 != rank.rank % 2;
    }
    EXPECT_EQ(masking.masks(), numbers(none));
    for (int round = 0; round < 2; ++round) {
      step(rank, c, masking.group(), none, 3);
      masking.mask_all(others, true);
      EXPECT_EQ(masking.masks(), numbers(others));
      expect_ranks(masking.status().masked, others);
      // The parts do different numbers of steps.
      step(rank, c, masking.group(), others, 4 + 3 * (rank.rank % 2));
      masking.mask_all(others, false);
      EXPECT_EQ(masking.masks(), numbers(none));
      ok(xd_comm_barrier(rank.comm));
      masking.reset();
      expect_ranks(masking.status().masked, none);
    }
    step(rank, c, masking.group(), none, 5);
  });
}

// Ranks that have masked each other agree about tables apart, and find out when they are together
// again.
TEST(LlMask, PartsOfAGroupHaveTablesOfTheirOwn) {
  LlCase c = masked_case();
  c.tables = Tables::replicas;
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    std::vector<bool> others(static_cast<std::size_t>(rank.num_ranks));
    for (int peer = 0; peer < rank.num_ranks; ++peer) {
      others[static_cast<std::size_t>(peer)] = peer % 2 != rank.rank % 2;
    }
    masking.mask_all(others, true);
    // Batches 0 and 2 have tables of their own.
    for (const int number : {2 * (rank.rank % 2), 2 - 2 * (rank.rank % 2)}) {
      const Given table(c.table(number));
      ok(finish(rank, masking.group(),
                xd_ll_group_set_placement(masking.group(), table.get(), rank.stream())));
      LlBatch batch(rank, c, number, others);
      batch.dispatch(masking.group());
      batch.combine(masking.group());
    }
    if (rank.num_ranks == 1) return;
    masking.mask_all(others, false);
    ok(xd_comm_barrier(rank.comm));
    masking.reset();
    LlBatch batch(rank, c, 0);
    const LlOutcome outcome = batch.call(masking.group(), XD_LL_DISPATCH);
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    expect_words(outcome.text, {"another placement"});
    const Given table(c.table(0));
    ok(finish(rank, masking.group(),
              xd_ll_group_set_placement(masking.group(), table.get(), rank.stream())));
    LlBatch whole(rank, c, 0);
    whole.dispatch(masking.group());
    whole.combine(masking.group());
  });
}

TEST(LlMask, SplitsAGroupThatWorksInPartsAndAgainAsAWhole) {
  splits_and_comes_together(masked_case());
}

// Rows that no block of a kernel adds up at once.
TEST(LlMask, SplitsAGroupWithLongRows) {
  LlCase c = masked_case();
  c.row_units = 2100;
  c.max_tokens = 5;
  c.num_sms = 2;  // each block sends or receives all rows
  splits_and_comes_together(c);
}

// Places follow from the counts of those ranks alone that are there.
TEST(LlMask, SplitsAGroupWhoseRowsLieWithoutGaps) {
  for (const xd_ll_receive form : {XD_LL_BY_EXPERT, XD_LL_BY_RANK}) {
    LlCase c = masked_case();
    c.receive = form;
    c.alignment = form == XD_LL_BY_EXPERT ? 4 : 1;
    splits_and_comes_together(c);
  }
}

// Of a rank that is left out while its rows are on their way. Where they come behind its header, as
// between GPUs, some may be lost though they are counted: nothing of them is left, weights and
// scales included.
void loses_whole_rows(const LlCase& c) {
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    const int late = rank.num_ranks - 1;
    std::vector<bool> others(static_cast<std::size_t>(rank.num_ranks), true);
    others[static_cast<std::size_t>(rank.rank)] = false;
    for (int number = 0; number < 8; ++number) {
      LlBatch batch(rank, c, number);
      const auto delay = std::chrono::microseconds(25 * (number % 4));
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank == late) std::this_thread::sleep_for(delay);
      ok(batch.call(masking.group(), XD_LL_DISPATCH, XD_LL_PHASE_SEND));
      if (rank.rank != late) masking.mask(late, true);
      const LlOutcome outcome = batch.call(masking.group(), XD_LL_DISPATCH, XD_LL_PHASE_RECEIVE);
      EXPECT_TRUE(outcome == XD_SUCCESS || outcome == XD_ERROR_PEER_LOST) << outcome.text;
      if (rank.rank != late) batch.expect_rows_whole_or_zero(late);
      ok(xd_comm_barrier(rank.comm));
      masking.mask_all(others, false);
      ok(xd_comm_barrier(rank.comm));
      masking.reset();
    }
  });
}

TEST(LlMask, LeavesNothingOfARowThatIsLostBehindItsHeader) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no other to leave out";
  for (const xd_ll_receive form : {XD_LL_BY_EXPERT, XD_LL_BY_RANK}) {
    for (const Sent sent : {Sent::as_they_are, Sent::float_scales}) {
      LlCase c = plain_ll_case(world().num_ranks());
      c.receive = form;
      c.sent = sent;
      c.row_units = 256;
      c.max_tokens = 32;
      loses_whole_rows(c);
    }
  }
}

// Steps in which ranks have different views of who is absent, so that an expert's slots are not
// what others would expect.
void echo(const Rank& rank, const LlCase& c, xd_ll_group* group, const std::vector<bool>& absent,
          int first, int count) {
  for (int number = first; number < first + count; ++number) {
    Echo batch(rank, c, number);
    ok(finish(rank, group, batch.dispatch(group)));
    EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(absent));
    ok(finish(rank, group, batch.combine(group)));
    EXPECT_EQ(batch.wrong(absent), "");
  }
}

// A rank learns at once that another does not wait for it any more, so it does not wait either.
TEST(LlMask, OfOneSideIsToldToTheOther) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no other side";
  const LlCase c = echo_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    const int accuser = 0, accused = rank.num_ranks - 1;
    const std::vector<bool> none(static_cast<std::size_t>(rank.num_ranks));
    std::vector<bool> absent = none;
    if (rank.rank == accuser) absent[static_cast<std::size_t>(accused)] = true;
    if (rank.rank == accused) absent[static_cast<std::size_t>(accuser)] = true;
    echo(rank, c, masking.group(), none, 0, 2);
    if (rank.rank == accuser) masking.mask(accused, true);
    Echo batch(rank, c, 2);
    const auto start = std::chrono::steady_clock::now();
    const LlOutcome outcome = finish(rank, masking.group(), batch.dispatch(masking.group()));
    EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(10));
    if (rank.rank == accused) {
      EXPECT_EQ(outcome, XD_ERROR_PEER_LOST);
      EXPECT_EQ(outcome.met.operation, XD_LL_DISPATCH);
      EXPECT_EQ(outcome.met.rank, accuser) << outcome.text;
      expect_ranks(outcome.met.masked, absent);
      expect_ranks(outcome.met.masked_by, absent);
    } else {
      EXPECT_EQ(outcome, XD_SUCCESS);
    }
    EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(absent));
    ok(finish(rank, masking.group(), batch.combine(masking.group())));
    EXPECT_EQ(batch.wrong(absent), "");
    // Third ranks go on with both.
    EXPECT_EQ(masking.masks(), numbers(absent));
    echo(rank, c, masking.group(), absent, 3, 20);
    masking.mask_all(absent, false);
    ok(xd_comm_barrier(rank.comm));
    masking.reset();
    echo(rank, c, masking.group(), none, 30, 20);
    expect_ranks(masking.status().masked_by, none);
  });
}

// The other side may still be in the reset when it is told.
TEST(LlMask, RightBehindAResetIsToldToTheOther) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank has no other side";
  const LlCase c = echo_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    const int accuser = 0, accused = rank.num_ranks - 1;
    std::vector<bool> absent(static_cast<std::size_t>(rank.num_ranks));
    if (rank.rank == accuser) absent[static_cast<std::size_t>(accused)] = true;
    if (rank.rank == accused) absent[static_cast<std::size_t>(accuser)] = true;
    for (int number = 0; number < 10; ++number) {
      ok(xd_comm_barrier(rank.comm));
      masking.reset();
      if (rank.rank == accuser) masking.mask(accused, true);
      Echo batch(rank, c, number);
      const LlOutcome outcome = finish(rank, masking.group(), batch.dispatch(masking.group()));
      EXPECT_EQ(outcome, rank.rank == accused ? XD_ERROR_PEER_LOST : XD_SUCCESS) << outcome.text;
      EXPECT_EQ(batch.rows_by_source(), batch.expected_rows(absent));
      ok(finish(rank, masking.group(), batch.combine(masking.group())));
      EXPECT_EQ(batch.wrong(absent), "");
      masking.mask_all(absent, false);
    }
  });
}

TEST(LlMask, OfNoOtherRankIsRefused) {
  const LlCase c = masked_case();
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    for (const int wrong : {rank.rank, rank.num_ranks, -1, XD_LL_MAX_RANKS}) {
      EXPECT_EQ(xd_ll_mask_set(masking.group(), wrong, 1, rank.stream()),
                XD_ERROR_INVALID_ARGUMENT);
      expect_said("rank");
    }
    Tensor wide(rank, kI64, {rank.num_ranks}), long_one(rank, kI32, {rank.num_ranks + 1});
    for (const DLTensor* mask : {wide.dl(), long_one.dl(), static_cast<const DLTensor*>(nullptr)}) {
      EXPECT_EQ(xd_ll_mask_get(masking.group(), mask, rank.stream()), XD_ERROR_INVALID_ARGUMENT);
      expect_said("mask");
    }
    rank.memory->synchronize();
    EXPECT_TRUE(wide.untouched() && long_one.untouched());
    step(rank, c, masking.group(), std::vector<bool>(static_cast<std::size_t>(rank.num_ranks)), 1);
  });
}

// Operations between their halves are forgotten, on ranks that are out of step; plans stay good.
TEST(LlReset, BringsRanksBackIntoStepWhateverTheyHadBegun) {
  const LlCase c = masked_case();
  on_every_rank([&](Rank& rank) {
    Masking masking(rank, c);
    LlBatch kept(rank, c, 0);
    kept.dispatch(masking.group());
    for (int round = 0; round < 3; ++round) {
      LlBatch a(rank, c, 1), b(rank, c, 2);
      const int turn = rank.rank + round;
      if (turn % 2 == 0) a.dispatch(masking.group(), XD_LL_PHASE_SEND);
      if (turn % 4 == 0) b.dispatch(masking.group(), XD_LL_PHASE_SEND);
      if (turn % 3 == 0) kept.combine(masking.group(), XD_LL_PHASE_SEND);
      masking.reset();
      for (const xd_ll_operation kind : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
        EXPECT_EQ(kept.call(masking.group(), kind, XD_LL_PHASE_RECEIVE), XD_ERROR_INVALID_ARGUMENT);
      }
      kept.next_combine();
      kept.combine(masking.group());
      kept.next_combine();
      step(rank, c, masking.group(), std::vector<bool>(static_cast<std::size_t>(rank.num_ranks)),
           5);
    }
  });
}

}  // namespace
}  // namespace xd::test
