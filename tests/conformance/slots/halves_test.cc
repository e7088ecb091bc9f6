// Halves of low-latency operations: what may be between them, and what is refused.
#include <gtest/gtest.h>

#include <cstdint>
#include <deque>
#include <string>

#include "conformance/slots/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr xd_ll_phase kSend = XD_LL_PHASE_SEND, kReceive = XD_LL_PHASE_RECEIVE;
constexpr xd_ll_operation kKinds[] = {XD_LL_DISPATCH, XD_LL_COMBINE};

// The half of the batch's operation, and all checks of it.
void run(LlBatch& batch, xd_ll_group* group, xd_ll_operation kind, xd_ll_phase phase) {
  kind == XD_LL_DISPATCH ? batch.dispatch(group, phase) : batch.combine(group, phase);
}

// Batches whose operation of this kind may begin: combine needs a plan.
void make_ready(std::deque<LlBatch>& batches, const Rank& rank, const LlCase& c, int count,
                xd_ll_group* group, xd_ll_operation kind) {
  for (int number = 0; number < count; ++number) {
    LlBatch& batch = batches.emplace_back(rank, c, number);
    if (kind == XD_LL_COMBINE) batch.dispatch(group);
  }
}

// The same without a tensor that it needs.
void fail(LlBatch& batch, xd_ll_group* group, xd_ll_operation kind, xd_ll_phase phase) {
  const bool receives = phase == kReceive;
  const char* const name = kind == XD_LL_DISPATCH ? (receives ? "recv_tokens" : "tokens")
                                                  : (receives ? "out" : "expert_out");
  LlBatch::Field& field = batch.field(kind, name);
  const DLTensor* const good = *field.slot;
  *field.slot = nullptr;
  const LlOutcome outcome = batch.call(group, kind, phase);
  *field.slot = good;
  EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
  EXPECT_TRUE(outcome.mentions(name)) << outcome.text;
  EXPECT_EQ(batch.written(kind), "");
}

// The outcome where a peer's send has failed.
void expect_mismatch(const LlOutcome& outcome, int guilty) {
  EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
  EXPECT_TRUE(outcome.mentions("rank " + std::to_string(guilty))) << outcome.text;
}

class LlHalves : public testing::TestWithParam<xd_ll_operation> {
 protected:
  LlHalves() : c(plain_ll_case(world().num_ranks())) { c.tokens = Tokens::differ; }
  LlCase c;
};

// The send that is one too many takes no turn: nothing has changed, for no rank, and after a
// receive half it works.
TEST_P(LlHalves, OneSendMoreThanMayBeInFlightIsBusyAndWorksAfterAReceive) {
  for (const int in_flight : {0, 2, 3, 4}) {
    c.in_flight = in_flight;
    SCOPED_TRACE(c.description());
    const int most = c.in_flight_of_group();
    on_every_rank([&](Rank& rank) {
      const LlGroup group = make_group(rank, c);
      std::deque<LlBatch> batches;
      make_ready(batches, rank, c, most + 1, group.get(), GetParam());
      for (int round = 0; round < 3; ++round) {
        for (int i = 0; i < most; ++i) {
          run(batches[static_cast<std::size_t>(i)], group.get(), GetParam(), kSend);
        }
        LlBatch& last = batches.back();
        // Ranks that try it more or less often stay in step.
        for (int i = 0; i < rank.rank % 3; ++i) {
          const LlOutcome outcome = last.call(group.get(), GetParam(), kSend);
          EXPECT_EQ(outcome, XD_ERROR_BUSY);
          EXPECT_EQ(last.written(GetParam()), "");
        }
        EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
        run(batches[0], group.get(), GetParam(), kReceive);
        run(last, group.get(), GetParam(), kSend);
        for (std::size_t i = 1; i < batches.size(); ++i) {
          run(batches[i], group.get(), GetParam(), kReceive);
        }
        for (LlBatch& batch : batches) batch.reset_tensors(GetParam());
      }
    });
  }
}

TEST_P(LlHalves, AReceiveWithoutASendIsRefusedAndTakesNoTurn) {
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 1, group.get(), GetParam());
    LlBatch& batch = batches.front();
    for (int round = 0; round < 3; ++round) {
      for (int i = 0; i < rank.rank % 2 + 1; ++i) {
        EXPECT_EQ(batch.call(group.get(), GetParam(), kReceive), XD_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(batch.written(GetParam()), "");
      }
      run(batch, group.get(), GetParam(), kSend);
      run(batch, group.get(), GetParam(), kReceive);
      batch.reset_tensors(GetParam());
    }
  });
}

// It would receive before the older one.
TEST_P(LlHalves, AWholeCallWhileOthersAreBetweenTheirHalvesIsRefusedAndTakesNoTurn) {
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    const auto most = static_cast<std::size_t>(c.in_flight_of_group());
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, c.in_flight_of_group() + 1, group.get(), GetParam());
    LlBatch& last = batches.back();
    for (std::size_t older = 1; older <= most; ++older) {  // also where a send half is BUSY
      for (std::size_t i = 0; i < older; ++i) run(batches[i], group.get(), GetParam(), kSend);
      for (int i = 0; i < rank.rank % 3; ++i) {
        EXPECT_EQ(last.call(group.get(), GetParam()), XD_ERROR_INVALID_ARGUMENT);
        EXPECT_EQ(last.written(GetParam()), "");
      }
      for (std::size_t i = 0; i < older; ++i) run(batches[i], group.get(), GetParam(), kReceive);
      run(last, group.get(), GetParam(), XD_LL_PHASE_BOTH);
      for (LlBatch& batch : batches) batch.reset_tensors(GetParam());
    }
  });
}

// The mistake is this rank's alone: its peers get whole results, and the group goes on.
TEST_P(LlHalves, AReceiveWithBadArgumentsEndsTheOperationHereAndNowhereElse) {
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 3, group.get(), GetParam());
    for (int guilty = 0; guilty < rank.num_ranks; ++guilty) {
      LlBatch &a = batches[0], &b = batches[1];
      run(a, group.get(), GetParam(), kSend);
      run(b, group.get(), GetParam(), kSend);
      if (rank.rank == guilty) {
        fail(a, group.get(), GetParam(), kReceive);
      } else {
        run(a, group.get(), GetParam(), kReceive);
      }
      run(b, group.get(), GetParam(), kReceive);
      for (LlBatch& batch : batches) batch.reset_tensors(GetParam());
    }
    run(batches[2], group.get(), GetParam(), XD_LL_PHASE_BOTH);
  });
}

// A send that fails is the whole operation of its rank. An older operation may be between its
// halves: it is whole, and comes first.
TEST_P(LlHalves, ASendThatFailsIsAMismatchForTheOthersWhateverIsBetweenItsHalves) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "there are no others";
  c.in_flight = 3;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 4, group.get(), GetParam());
    int turn = 0;
    for (const bool older : {false, true}) {
      for (const bool younger : {false, true}) {
        for (const bool whole : {false, true}) {  // the guilty rank's call
          if (whole && older) continue;           // it would receive the older one's rows
          const int guilty = turn++ % rank.num_ranks;
          SCOPED_TRACE(std::to_string(guilty) + (older ? " older" : "") +
                       (younger ? " younger" : "") + (whole ? " whole" : " half"));
          LlBatch &a = batches[0], &b = batches[1], &d = batches[2];
          if (older) run(a, group.get(), GetParam(), kSend);
          if (rank.rank == guilty) {
            fail(b, group.get(), GetParam(), whole ? XD_LL_PHASE_BOTH : kSend);
          } else {
            run(b, group.get(), GetParam(), kSend);
          }
          if (younger) run(d, group.get(), GetParam(), kSend);
          if (older) run(a, group.get(), GetParam(), kReceive);
          if (rank.rank != guilty) {
            expect_mismatch(b.call(group.get(), GetParam(), kReceive), guilty);
          }
          if (younger) run(d, group.get(), GetParam(), kReceive);
          // The older one's plan is whole, also that of the rank whose send has failed since.
          if (older && GetParam() == XD_LL_DISPATCH) {
            a.combine(group.get());
            a.reset_tensors(XD_LL_COMBINE);
          }
          for (LlBatch& batch : batches) batch.reset_tensors(GetParam());
        }
      }
    }
    run(batches[3], group.get(), GetParam(), XD_LL_PHASE_BOTH);
  });
}

// A rank whose send half has failed waits for nobody: between the halves of its peers there may be
// whole operations of the other kind, for which they need it. Places that have been sent to in vain
// are used again, also at once.
TEST_P(LlHalves, ASendThatFailsHoldsNobodyUp) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "there are no others";
  const bool dispatches = GetParam() == XD_LL_DISPATCH;
  for (const int in_flight : {2, 4}) {
    SCOPED_TRACE(in_flight);
    c.in_flight = in_flight;
    on_every_rank([&](Rank& rank) {
      const LlGroup group = make_group(rank, c);
      std::deque<LlBatch> batches;
      make_ready(batches, rank, c, 3, group.get(), GetParam());
      LlBatch &vain = batches[0], &good = batches[1], &between = batches[2];
      if (dispatches) between.dispatch(group.get());
      for (int turn = 0; turn < 3 * in_flight; ++turn) {
        const int guilty = turn % rank.num_ranks;
        vain.reset_tensors(GetParam());
        between.reset_tensors(dispatches ? XD_LL_COMBINE : XD_LL_DISPATCH);
        if (rank.rank == guilty) {
          fail(vain, group.get(), GetParam(), kSend);
        } else {
          run(vain, group.get(), GetParam(), kSend);
        }
        if (dispatches) {
          between.combine(group.get());
        } else {
          between.dispatch(group.get());
        }
        if (rank.rank != guilty) {
          expect_mismatch(vain.call(group.get(), GetParam(), kReceive), guilty);
        }
        for (int i = 0; i < turn % 3; ++i) {
          run(good, group.get(), GetParam(), XD_LL_PHASE_BOTH);
          good.reset_tensors(GetParam());
        }
      }
      for (int i = 0; i < 2 * in_flight; ++i) {
        run(good, group.get(), GetParam(), XD_LL_PHASE_BOTH);
        good.reset_tensors(GetParam());
      }
    });
  }
}

// A slot that was left full is free again before it is used again: there a rank may wait for a peer
// that is still about to make a whole operation of the other kind with it.
TEST_P(LlHalves, BehindOneThatFailedRanksMayOrderKindsDifferently) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "there are no others";
  const xd_ll_operation other = GetParam() == XD_LL_DISPATCH ? XD_LL_COMBINE : XD_LL_DISPATCH;
  for (const int in_flight : {2, 3}) {
    SCOPED_TRACE(in_flight);
    c.in_flight = in_flight;
    on_every_rank([&](Rank& rank) {
      const LlGroup group = make_group(rank, c);
      std::deque<LlBatch> batches;
      make_ready(batches, rank, c, 3, group.get(), GetParam());
      LlBatch &vain = batches[0], &good = batches[1], &between = batches[2];
      if (other == XD_LL_COMBINE) between.dispatch(group.get());
      for (int turn = 0; turn < 2 * in_flight; ++turn) {
        const int guilty = turn % rank.num_ranks;
        if (rank.rank == guilty) {
          fail(vain, group.get(), GetParam(), XD_LL_PHASE_BOTH);
        } else {
          expect_mismatch(vain.call(group.get(), GetParam(), XD_LL_PHASE_BOTH), guilty);
        }
        for (int i = 1; i < in_flight; ++i) {
          run(good, group.get(), GetParam(), XD_LL_PHASE_BOTH);
          good.reset_tensors(GetParam());
        }
        const bool first = (rank.rank + turn) % 2 == 0;
        between.reset_tensors(other);
        if (first) run(good, group.get(), GetParam(), kSend);
        run(between, group.get(), other, XD_LL_PHASE_BOTH);
        if (!first) run(good, group.get(), GetParam(), kSend);
        run(good, group.get(), GetParam(), kReceive);
        good.reset_tensors(GetParam());
        vain.reset_tensors(GetParam());
      }
    });
  }
}

TEST_P(LlHalves, OneRankInHalvesMeetsOthersWithWholeCalls) {
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 5, group.get(), GetParam());
    for (int apart = 0; apart < rank.num_ranks; ++apart) {
      for (LlBatch& batch : batches) {
        if (rank.rank == apart) {
          run(batch, group.get(), GetParam(), kSend);
          run(batch, group.get(), GetParam(), kReceive);
        } else {
          run(batch, group.get(), GetParam(), XD_LL_PHASE_BOTH);
        }
        batch.reset_tensors(GetParam());
      }
    }
  });
}

std::string kind_name(const testing::TestParamInfo<xd_ll_operation>& instance) {
  return instance.param == XD_LL_DISPATCH ? "dispatch" : "combine";
}
INSTANTIATE_TEST_SUITE_P(Kinds, LlHalves, testing::ValuesIn(kKinds), kind_name);

// Dispatch and combine count apart.
TEST(LlSequence, DispatchAndCombineMayBothBeFullOfOperations) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.in_flight = 2;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 4, group.get(), XD_LL_DISPATCH);
    for (std::size_t i : {0, 1}) batches[i].dispatch(group.get());
    batches[2].dispatch(group.get(), kSend);
    batches[3].dispatch(group.get(), kSend);
    batches[0].combine(group.get(), kSend);
    batches[1].combine(group.get(), kSend);
    EXPECT_EQ(batches[2].call(group.get(), XD_LL_DISPATCH, kSend), XD_ERROR_BUSY);
    EXPECT_EQ(batches[0].call(group.get(), XD_LL_COMBINE, kSend), XD_ERROR_BUSY);
    batches[2].dispatch(group.get(), kReceive);
    batches[0].combine(group.get(), kReceive);
    batches[3].dispatch(group.get(), kReceive);
    batches[1].combine(group.get(), kReceive);
    for (std::size_t i : {3, 2}) batches[i].combine(group.get());
  });
}

// Ranks meet dispatches and combines in other orders: only the order of a kind is common.
TEST(LlSequence, RanksMayOrderDispatchesAndCombinesDifferently) {
  LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 2, group.get(), XD_LL_DISPATCH);
    batches[0].dispatch(group.get());
    if (rank.rank % 2 == 0) {
      batches[1].dispatch(group.get(), kSend);
      batches[0].combine(group.get(), kSend);
      batches[1].dispatch(group.get(), kReceive);
      batches[0].combine(group.get(), kReceive);
    } else {
      batches[0].combine(group.get(), kSend);
      batches[1].dispatch(group.get(), kSend);
      batches[0].combine(group.get(), kReceive);
      batches[1].dispatch(group.get(), kReceive);
    }
    batches[1].combine(group.get());
  });
}

TEST(LlSequence, PlansAliveTogetherServeTheirCombinesInAnyOrder) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.fewer_choices = c.shorter_rows = true;
  c.topk = 7;
  c.tokens = Tokens::differ;
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    std::deque<LlBatch> batches;
    make_ready(batches, rank, c, 4, group.get(), XD_LL_DISPATCH);
    for (LlBatch& batch : batches) batch.dispatch(group.get());
    for (const std::size_t i : {2, 0, 3, 1, 1, 2}) {
      batches[i].combine(group.get());
      batches[i].next_combine();
    }
    // A plan is bytes: a copy of it elsewhere is as good.
    Buffer copy(rank, batches[3].plan().bytes(), Place::ordinary);
    copy.write(batches[3].plan().read());
    batches[3].plan().fill(kPoison);
    batches[3].use_plan(copy);
    batches[3].combine(group.get());
  });
}

TEST(LlSequence, GroupsOfBothKindsTakeTurns) {
  LlCase c = plain_ll_case(world().num_ranks()), other = c;
  other.local_experts = 5;
  other.max_tokens = 30;
  other.dtype = kF32;
  other.seed += 1;
  on_every_rank([&](Rank& rank) {
    const LlGroup first = make_group(rank, c), second = make_group(rank, other);
    LlBatch a(rank, c, 0), b(rank, other, 0);
    a.dispatch(first.get(), kSend);
    b.dispatch(second.get(), kSend);
    b.dispatch(second.get(), kReceive);
    a.dispatch(first.get(), kReceive);
    b.combine(second.get(), kSend);
    a.combine(first.get(), kSend);
    a.combine(first.get(), kReceive);
    b.combine(second.get(), kReceive);
  });
}

TEST(LlSequence, EqualInputsGiveEqualBitsAgain) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    for (int i = 0; i < 10; ++i) {
      batch.dispatch(group.get());
      batch.combine(group.get());
      batch.reset_tensors(XD_LL_DISPATCH);
      batch.reset_tensors(XD_LL_COMBINE);
    }
  });
}

// The numbers of a plan tell batches apart.
TEST(LlSequence, EachPlanHasAFingerprintOfItsOwn) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const LlGroup group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    std::uint64_t last = 0;
    for (int i = 0; i < 5; ++i) {
      batch.dispatch(group.get());
      const std::uint64_t fingerprint = batch.plan_info().fingerprint;
      EXPECT_NE(fingerprint, last);
      last = fingerprint;
      batch.reset_tensors(XD_LL_DISPATCH);
    }
  });
}

}  // namespace
}  // namespace xd::test
