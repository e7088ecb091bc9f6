// Plans as bytes: codes, binding, damage.
#include "ep/plan/plan.h"

#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "ep/bulk/wire.h"
#include "ep/plan/plan_check.h"
#include "support/plan_format.h"
#include "unit/errors.h"

namespace xd::ep {
namespace {

using test::expect_words;

// The version is raised with every change of the header.
static_assert(sizeof(PlanHeader) == test::kPlanHeaderBytes &&
              PlanHeader::kVersion == test::kPlanVersion &&
              PlanHeader::kHasParts == test::kPlanHasParts &&
              offsetof(PlanHeader, version) == test::kPlanVersionAt &&
              offsetof(PlanHeader, keeps_list) + PlanHeader::kPartsShift / 8 == test::kPlanPartsAt);

constexpr std::array<std::int64_t, 4> kCapacities = {7, 0, 1, 100};

TEST(RowCodecTest, EveryRowOfEveryRankComesBackInBothLayouts) {
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    const RowCodec codec(kCapacities, Layout::of(layout), 5);
    const int experts = layout == XD_EP_RANK_MAJOR ? 5 : 1;
    std::uint32_t expected = 0;  // codes are dense: no two rows share one
    for (int rank = 0; rank < 4; ++rank) {
      for (std::int64_t row = 0; row < kCapacities[static_cast<std::size_t>(rank)]; ++row) {
        for (int expert = 0; expert < experts; ++expert, ++expected) {
          const std::uint32_t code = codec.encode({rank, row, expert});
          ASSERT_EQ(code, expected);
          RowRef ref{};
          ASSERT_TRUE(codec.decode(code, ref));
          ASSERT_EQ(ref.rank, rank);
          ASSERT_EQ(ref.row, row);
          ASSERT_EQ(ref.expert, expert);
        }
      }
    }
    RowRef ref{};
    EXPECT_FALSE(codec.decode(expected, ref));
    EXPECT_FALSE(codec.decode(RowCodec::kNone, ref));
  }
}

TEST(RowCodecTest, RefusesCapacitiesThatDoNotFit) {
  const std::array<std::int64_t, 2> large = {INT32_MAX - 1, INT32_MAX - 1};
  EXPECT_NO_THROW(RowCodec(large, Layout::of(XD_EP_EXPERT_MAJOR), 64));
  // 64 experts times 2^32 rows do not fit into 32 bits.
  test::expect_error(test::error_of([&] { RowCodec(large, Layout::of(XD_EP_RANK_MAJOR), 64); }),
                     XD_ERROR_INVALID_ARGUMENT, "recv_capacity");
}

class PlanTest : public testing::Test {
 protected:
  PlanTest() { make(1); }

  // Makes the plan anew, with that many parts.
  void make(int parts) {
    map_ = PlanMap::make({.local_experts = 2, .tokens = 3, .topk = 2, .ranks = 2, .parts = parts});
    bytes_.assign(map_.end / sizeof(Block), {});
    PlanHeader header{};
    header.rank = 1;
    header.ranks = 2;
    header.experts = 4;
    header.local_experts = 2;
    header.tokens = 3;
    header.topk = 2;
    header.alignment = 4;
    header.keeps_list = 1;
    if (parts > 1) {
      header.version = PlanHeader::kHasParts;
      header.keeps_list |= parts << PlanHeader::kPartsShift;
    }
    header.capacity = 16;
    header.capacities = 99;
    std::memcpy(data(), &header, sizeof(header));
    seal_plan(data());
    config_.ranks = 2;
    config_.experts = 4;
    config_.local_experts = 2;
    config_.expert_tables = ExpertTables::even(4, 2);
    config_.max_tokens = 3;
    config_.max_topk = 2;
    config_.capacity = 16;
    config_.alignment = 4;
    config_.keeps.lists = true;
  }

  std::byte* data() { return bytes_.data()->bytes; }
  std::size_t size() const { return bytes_.size() * sizeof(Block); }

  std::string open_error(std::size_t size) {
    return test::refusal_of([&] { PlanView::open(data(), size); });
  }

  struct alignas(16) Block {
    std::byte bytes[16];
  };
  PlanMap map_{};
  std::vector<Block> bytes_;
  Config config_;
};

TEST_F(PlanTest, EveryChangedBitOfHeaderAndZonesIsNoticed) {
  for (const int parts : {1, 2}) {
    SCOPED_TRACE(std::to_string(parts) + " parts");
    make(parts);
    for (std::size_t i = 0; i < map_.code; ++i) {
      // Between the zones and the codes there may be padding, which the checksum covers as well.
      for (int bit = 0; bit < 8; ++bit) {
        data()[i] ^= std::byte(1 << bit);
        EXPECT_NE(open_error(size()), "") << "byte " << i << " bit " << bit;
        data()[i] ^= std::byte(1 << bit);
      }
    }
    EXPECT_EQ(open_error(size()), "");
  }
}

// Also where the sizes that follow from P would be another plan's.
TEST_F(PlanTest, NumbersOfPartsThatNoPlanHasAreNoticed) {
  make(2);
  PlanHeader header{};
  std::memcpy(&header, data(), sizeof(header));
  for (const int parts : {-1, 0, 1, 3, 16, 17, 1 << 20}) {
    header.keeps_list = 1 | parts * (1 << PlanHeader::kPartsShift);
    std::memcpy(data(), &header, sizeof(header));
    EXPECT_EQ(open_error(size()), "plan: its header is damaged") << parts;
  }
}

TEST_F(PlanTest, VersionsAreNotMixedUpWithParts) {
  for (const int parts : {1, 2}) {
    make(parts);
    PlanHeader header{};
    std::memcpy(&header, data(), sizeof(header));
    header.version += 1;
    expect_words(text_of(header_fault(header, size())), {"version 4, expected 3"});
  }
}

TEST_F(PlanTest, EveryTruncationIsNoticed) {
  for (const int parts : {1, 2}) {
    make(parts);
    for (std::size_t cut = 0; cut < size(); ++cut) {
      EXPECT_NE(open_error(cut).find("cut short"), std::string::npos) << cut;
    }
  }
}

TEST_F(PlanTest, ForeignPlansAreNamedByWhatDiffers) {
  const PlanView plan = PlanView::open(data(), size());
  const auto refusal = [&](PlanBinding binding) {
    return test::refusal_of([&] { plan.require_binding(binding); });
  };
  expect_words(refusal({0, &config_, 99}), {"rank = 1, used with rank = 0"});
  expect_words(refusal({1, &config_, 98}), {"capacities of the peers"});
  Config other = config_;
  const std::array<std::int32_t, 4> swapped{1, 1, 0, 0};
  other.expert_tables = ExpertTables::read(swapped.data(), 4, 2, "");
  EXPECT_EQ(refusal({1, &other, 99}), "plan: made for other expert_ranks than this group's");
  EXPECT_EQ(refusal({1, &config_, 99, 5}),
            "plan: made with other ranks than have entered this group's view, or on other hosts "
            "than this communicator's (config.host): make it again by xd_ep_prepare");
  other = config_;
  other.overflow = XD_EP_OVERFLOW_DROP;
  expect_words(refusal({1, &other, 99}), {"overflow policy"});
  other = config_;
  other.capacity += 1;
  expect_words(refusal({1, &other, 99}), {"recv_capacity"});
  other = config_;
  other.max_tokens = 2;
  expect_words(refusal({1, &other, 99}), {"3 tokens"});
  other = config_;
  other.alignment = 2;
  expect_words(refusal({1, &other, 99}), {"alignment = 4, the group's bound is 2"});
  other.alignment = 8;
  EXPECT_EQ(refusal({1, &other, 99}), "");
}

TEST(WireTest, CountWordsBelongToOneEpoch) {
  const std::uint64_t word = count_word(0xFFFFFFFF, 0x5'00000007);
  EXPECT_EQ(count_of(word), 0xFFFFFFFF);
  EXPECT_TRUE(count_is_of(word, 0x5'00000007));
  EXPECT_FALSE(count_is_of(word, 0x5'00000008));
  EXPECT_FALSE(count_is_of(0, 1));  // memory as it is created
}

TEST(WireTest, AreasOfAGroupDoNotOverlapAndStagingIsOptional) {
  Config config;
  config.ranks = 3;
  config.experts = 6;
  config.expert_tables = ExpertTables::even(6, 3);
  config.max_topk = 4;
  config.max_row_bytes = 48;
  config.max_scale_bytes = 5;
  config.layout = Layout::of(XD_EP_RANK_MAJOR);
  config.overflow = XD_EP_OVERFLOW_DROP;
  config.capacity = 10;
  const GroupMap map = GroupMap::make(config);
  EXPECT_GE(map.turn.done, map.turn.entry + 6 * sizeof(turn::Entry<Record>));
  EXPECT_GE(map.counts, map.turn.done + 6 * sizeof(turn::DoneFlag));
  EXPECT_GE(map.kept, map.counts + std::uint64_t{6} * (6 + 3 + 2) * sizeof(std::uint64_t));
  EXPECT_GE(map.scales, map.kept + 6 * sizeof(std::uint32_t));
  EXPECT_GE(map.weights, map.scales + 50);
  EXPECT_GE(map.indices, map.weights + 40 * sizeof(float));
  EXPECT_GE(map.rows, map.indices + 40 * sizeof(std::int64_t));
  EXPECT_GE(map.end, map.rows + 480);
  config.staging = false;
  EXPECT_EQ(GroupMap::make(config).end, map.rows);
}

// Sums of rows that their owner pushes have a place in plans and in memory, by either layout.
TEST(WireTest, PlansAndMemoryHaveRoomWhereSumsArePushed) {
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    for (const bool staging : {false, true}) {
      for (const std::uint32_t wires : {0u, XD_EP_WIRE_BIT(XD_EP_WIRE_FP8_BLOCK128)}) {
        Config config;
        config.ranks = config.experts = 2;
        config.expert_tables = ExpertTables::even(2, 2);
        config.max_topk = config.max_tokens = 2;
        config.max_row_bytes = 256;
        config.layout = Layout::of(layout);
        config.capacity = 1000;
        config.staging = staging;
        config.wire_formats = wires;
        const bool pushes = layout == XD_EP_EXPERT_MAJOR || staging || wires != 0;
        EXPECT_EQ(config.pushes_sums(), pushes);
        const PlanMap map = PlanMap::make({.local_experts = 1,
                                           .tokens = 2,
                                           .topk = 2,
                                           .list_rows = config.layout.row_per_expert ? 1000 : 0,
                                           .items = pushes ? 1000 : 0,
                                           .ranks = 2,
                                           .parts = 1});
        EXPECT_EQ(plan_size(config), map.end) << layout << staging << wires;
        config.staging = false;
        config.keeps.partials = pushes;
        const GroupMap memory = GroupMap::make(config);
        EXPECT_EQ(memory.end - memory.partials() >= 1024, pushes);
      }
    }
  }
}

TEST(WireTest, StagingHasRoomForTheScalesOfEveryWayToQuantise) {
  for (const std::uint64_t hidden : {32u, 96u, 128u, 7168u}) {
    Config config;
    config.ranks = config.experts = config.max_topk = config.max_tokens = 1;
    config.expert_tables = ExpertTables::even(1, 1);
    config.max_row_bytes = 2 * hidden;  // of bf16
    config.capacity = 1000;
    const GroupMap map = GroupMap::make(config);
    for (const auto way : {XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2,
                           XD_EP_QUANTISE_FP8_BLOCK128_E8M0, XD_EP_QUANTISE_MXFP8}) {
      const QuantiseFormat format = quantise_format(way);
      if (hidden % format.block != 0) continue;
      EXPECT_GE(map.weights - map.scales, 1000 * format.scale_row_bytes(hidden)) << hidden;
    }
    config.max_scale_bytes = hidden;  // a caller's may be longer
    const GroupMap roomy = GroupMap::make(config);
    EXPECT_GE(roomy.weights - roomy.scales, 1000 * hidden);
  }
}

}  // namespace
}  // namespace xd::ep
