// What decides about launches on CUDA devices, without one: chunks, pieces of rows, numbers of
// multiprocessors.
#include <gtest/gtest.h>

#include <cstdint>

#include "base/error.h"
#include "ep/cuda/launch_plan.h"
#include "ep/cuda/mover_plan.h"
#include "ep/wire.h"

namespace xd::ep::cuda {
namespace {

constexpr DeviceFacts kHopper{
    .sms = 132, .shared_bytes = std::size_t{227} * 1024, .ranks_on_device = 1};

TEST(ChunkFlagsTest, CoverAllTokensAndStayWithinTheirBound) {
  for (const ChunkFlags chunks : {sent_chunks(), summed_chunks()}) {
    for (int tokens = 0; tokens <= 20000; tokens = tokens * 5 / 4 + 1) {
      const int each = chunks.tokens_per_chunk(tokens), count = chunks.count(tokens);
      EXPECT_GE(each, 1);
      EXPECT_LE(each, chunks.most_tokens);
      EXPECT_GE(count * each, tokens) << tokens;
      EXPECT_LT((count - 1) * each, tokens + (tokens == 0)) << tokens;
      for (const int bound : {tokens, tokens + 1, 2 * tokens, 20000}) {
        if (bound >= tokens) {
          EXPECT_LE(count, chunks.bound(bound)) << tokens << " of " << bound;
        }
      }
    }
  }
}

TEST(MoverPlanTest, PiecesCoverTheRowAndFitTheirStages) {
  for (std::uint64_t bytes = 16; bytes <= (1u << 20); bytes = (bytes * 3 / 2 + 16) / 16 * 16) {
    const MoverPlan plan = MoverPlan::make(bytes, false);
    EXPECT_LE(plan.piece_bytes, MoverPlan::kMostPieceBytes);
    EXPECT_GE(std::uint64_t{plan.pieces} * plan.piece_bytes, bytes);
    EXPECT_LT(std::uint64_t{plan.pieces - 1} * plan.piece_bytes, bytes) << "an empty piece";
    EXPECT_EQ(plan.piece_bytes % MoverPlan::kAlign, 0u);
    EXPECT_GE(plan.warp_bytes, kStages * plan.piece_bytes);
    EXPECT_EQ(plan.warp_bytes % 128, 0u);
  }
}

TEST(MoverPlanTest, QuantisedPiecesHoldWholeBlocksAndTheirScales) {
  for (std::uint64_t columns = 128; columns <= 65536; columns += 896) {
    const MoverPlan plan = MoverPlan::make(columns * 2, true);
    EXPECT_EQ(plan.piece_bytes % 256, 0u);
    const std::uint32_t scales = plan.piece_bytes / 256 * 4;
    EXPECT_GE(plan.out_bytes, plan.scales_at() + scales);
    EXPECT_EQ(plan.scales_at() % 16, 0u);
    EXPECT_LT(std::uint64_t{plan.pieces - 1} * plan.piece_bytes, columns * 2);
  }
}

TEST(MoverPlanTest, ScalesTravelBesideRowsWhereBulkCopiesCanCarryThem) {
  EXPECT_EQ(MoverPlan::make(7168, false, 224).beside_bytes, 224u);
  EXPECT_EQ(MoverPlan::make(7168, false, 7).beside_bytes, 0u);
  EXPECT_EQ(MoverPlan::make(14336, true, 224).beside_bytes, 0u) << "they are made on the way";
}

TEST(LaunchPlanTest, FewerRanksNeedMoreMultiprocessorsToFillTheirLinks) {
  const MoverPlan row = MoverPlan::make(14336, false);
  int last = kHopper.sms;
  for (const int ranks : {2, 3, 4, 8}) {
    const Traffic traffic{.ranks = ranks, .tokens = 4096, .row_bytes = 14336, .receives = false};
    const LaunchPlan plan = plan_dispatch(traffic, row, row, 0, 128, kHopper);
    EXPECT_LT(plan.blocks, last) << ranks;
    EXPECT_EQ(plan.first_blocks, plan.blocks) << "nobody waits for rows";
    last = plan.blocks;
  }
}

TEST(LaunchPlanTest, StaysWithinTheBudgetAndTheDevice) {
  for (const std::uint64_t bytes : {16u, 7168u, 14336u, 200000u}) {
    for (const bool quantise : {false, true}) {
      const MoverPlan row = MoverPlan::make(bytes / 256 * 256 + 256, quantise);
      for (const int budget : {1, 2, 16, 128}) {
        for (const int tokens : {0, 1, 128, 4096}) {
          for (const int sms : {0, 1, 64}) {
            const Traffic traffic{
                .ranks = 4, .tokens = tokens, .row_bytes = bytes, .receives = true};
            const LaunchPlan sent = plan_dispatch(traffic, row, row, sms, budget, kHopper);
            const LaunchPlan summed = plan_combine(traffic, sms, budget, kHopper);
            for (const LaunchPlan& plan : {sent, summed}) {
              EXPECT_GE(plan.blocks, 1);
              EXPECT_LE(plan.blocks, budget);
              EXPECT_GE(plan.first_blocks, 1);
              EXPECT_LE(plan.first_blocks, plan.blocks);
              EXPECT_LE(plan.threads, 1024);
              EXPECT_LT(plan.shared_bytes, kHopper.shared_bytes);
            }
          }
        }
      }
    }
  }
}

TEST(LaunchPlanTest, RanksOfOneDeviceShareIt) {
  Config config;
  for (const int ranks : {1, 2, 3, 8, 40}) {
    DeviceFacts device = kHopper;
    device.ranks_on_device = ranks;
    EXPECT_LE(sm_budget(config, device) * ranks, device.sms) << ranks;
    EXPECT_GE(sm_budget(config, device), 1);
  }
  DeviceFacts device = kHopper;
  device.ranks_on_device = 4;
  config.num_sms = 33;
  EXPECT_EQ(sm_budget(config, device), 33);
  config.num_sms = 34;
  try {
    sm_budget(config, device);
    FAIL() << "4 * 34 blocks fit on 132 multiprocessors?";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), XD_ERROR_INVALID_ARGUMENT);
    EXPECT_NE(error.text().find("expected at most 33"), std::string::npos) << error.text();
  }
}

TEST(LaunchPlanTest, ExplainsItselfInOneLine) {
  const Traffic traffic{.ranks = 4, .tokens = 4096, .row_bytes = 14336, .receives = false};
  const LaunchPlan plan = plan_combine(traffic, 0, 128, kHopper);
  const std::string line = explain("combine", plan, traffic, 0, 128);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  EXPECT_NE(line.find(std::to_string(plan.blocks) + " multiprocessors (chosen"), std::string::npos)
      << line;
}

}  // namespace
}  // namespace xd::ep::cuda
