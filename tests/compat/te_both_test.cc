// Both compat headers in one program: a group, and contexts of every kind, some of which another
// translation unit has made in a library of its own, on one communicator.
#include <crossdock/compat/te_comm_gemm.h>
#include <crossdock/compat/te_ep.h>
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "compat/te_ep_batch.h"
#include "compat/te_library.h"
#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using crossdock::te::as_nccl;

struct DestroyTeContext {
  void operator()(NVTECommGemmCtx* ctx) const { nvte_comm_gemm_ctx_destroy(ctx); }
};
using TeContext = std::unique_ptr<NVTECommGemmCtx, DestroyTeContext>;

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
    rows_.write(numbers(gathers() ? rank.rank * kOwn : 0, gathers() ? kOwn : all(), kInner, 1));
  }

  void run(NVTECommGemmCtx* ctx) {
    const auto function = gathers()                              ? nvte_all_gather_gemm
                          : operation_ == XD_GEMM_REDUCE_SCATTER ? nvte_gemm_reduce_scatter
                                                                 : nvte_gemm_all_reduce;
    const std::int64_t ranks = rank_.num_ranks;
    function(ctx, gathers() ? kColumns * ranks : kColumns, all(),
             gathers() ? kInner : kInner * ranks, te_tensor(weights_.dl()).data(),
             te_tensor(rows_.dl()).data(), te_tensor(result_.dl()).data(), nullptr, nullptr, true,
             false, false, false, 0, rank_.stream(), kNVTECommGemmAlgoDefault);
    rank_.memory->synchronize();
  }

  void check() {
    const bool scatters = operation_ == XD_GEMM_REDUCE_SCATTER;
    EXPECT_EQ(result_.read_as<float>(),
              numbers(scatters ? rank_.rank * kOwn : 0, scatters ? kOwn : all(), kColumns,
                      gathers() ? kInner : kInner * rank_.num_ranks))
        << name_of(operation_);
    EXPECT_TRUE(result_.buffer().guards_intact());
  }

 private:
  static constexpr std::int64_t kOwn = 2, kInner = 4, kColumns = 8;
  bool gathers() const { return operation_ == XD_GEMM_ALL_GATHER; }
  std::int64_t all() const { return kOwn * rank_.num_ranks; }

  // Rows of `columns` equal numbers: row i has (first + i) * factor.
  static std::vector<float> numbers(std::int64_t first, std::int64_t rows, std::int64_t columns,
                                    std::int64_t factor) {
    std::vector<float> values;
    for (std::int64_t i = first; i < first + rows; ++i) {
      values.insert(values.end(), static_cast<std::size_t>(columns),
                    static_cast<float>(i * factor));
    }
    return values;
  }

  const Rank rank_;
  const xd_gemm_operation operation_;
  Tensor weights_, rows_, result_;
};

TEST(TeBoth, AGroupAndContextsOfEveryKindTakeTurnsOnOneCommunicator) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch direct(rank, c), batch(rank, c);
    {
      const Group group = make_group(rank.comm, c.config(rank.rank));
      direct.run_all_directly(group.get());
    }
    const NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    nvte_ep_initialize(as_nccl(rank.comm), &config);
    const TeContext own(nvte_comm_gemm_ctx_create(as_nccl(rank.comm), rank.num_ranks, rank.rank));
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
    nvte_ep_shutdown();
  });
}

}  // namespace
}  // namespace xd::test
