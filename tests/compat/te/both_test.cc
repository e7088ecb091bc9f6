// Both compat headers in one program: a group, and contexts of every kind, some of which another
// translation unit has made in a library of its own, on one communicator.
#include <gtest/gtest.h>

#include <array>
#include <vector>

#include "compat/te/ep_batch.h"
#include "compat/te/library.h"
#include "compat/te/product.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using crossdock::te::as_nccl;

// [2 W, 4] of rows 0, 1, ..., of which a gather gives this rank two, times ones.
class Product {
 public:
  Product(const Rank& rank, xd_gemm_operation operation)
      : rank_(rank),
        operation_(operation),
        weights_(rank, kF32, {kColumns, kInner}),
        rows_(rank, kF32, {gathers() ? kOwn : all(), kInner}),
        result_(rank, kF32, {operation == XD_GEMM_REDUCE_SCATTER ? kOwn : all(), kColumns}) {
    weights_.write(std::vector<float>(kColumns * kInner, 1.0f));
    rows_.write(
        equal_columns(gathers() ? rank.rank * kOwn : 0, gathers() ? kOwn : all(), kInner, 1));
  }

  void run(NVTECommGemmCtx* ctx) {
    const std::int64_t ranks = rank_.num_ranks;
    const std::array mnk{gathers() ? kColumns * ranks : kColumns, all(),
                         gathers() ? kInner : kInner * ranks};
    multiply(rank_, ctx, operation_, mnk, weights_, rows_, result_);
  }

  void check() {
    const bool scatters = operation_ == XD_GEMM_REDUCE_SCATTER;
    EXPECT_EQ(result_.read_as<float>(),
              equal_columns(scatters ? rank_.rank * kOwn : 0, scatters ? kOwn : all(), kColumns,
                            gathers() ? kInner : kInner * rank_.num_ranks))
        << name_of(operation_);
    EXPECT_TRUE(result_.buffer().guards_intact());
  }

 private:
  static constexpr std::int64_t kOwn = 2, kInner = 4, kColumns = 8;
  bool gathers() const { return operation_ == XD_GEMM_ALL_GATHER; }
  std::int64_t all() const { return kOwn * rank_.num_ranks; }

  const Rank rank_;
  const xd_gemm_operation operation_;
  Tensor weights_, rows_, result_;
};

TEST(TeBoth, AGroupAndContextsOfEveryKindTakeTurnsOnOneCommunicator) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch direct(rank, c), batch(rank, c);
    direct.run_all_directly(rank.comm, c.config(rank.rank));
    const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
    const TeContext own = make_te_context(rank, as_nccl(rank.comm));
    const TeContext other(context_of_library(rank.comm, rank.num_ranks, rank.rank));
    EXPECT_EQ(group_seen_by_library(), crossdock::te::ep_group());
    batch.use_group();
    for (int turn = 0; turn < 2; ++turn) {
      for (const xd_gemm_operation operation : kGemmProducts) {
        Product by_own(rank, operation), by_other(rank, operation);
        by_own.run(own.get());
        batch.run_all();
        by_other.run(other.get());
        by_own.check();
        by_other.check();
      }
      batch.expect_equal(direct);
    }
  });
}

}  // namespace
}  // namespace xd::test
