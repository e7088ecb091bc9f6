// Plans of low latency as bytes, and the arithmetic beside them.
#include "ep/slots/plan.h"

#include <gtest/gtest.h>

#include <bit>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "ep/slots/placement.h"
#include "unit/errors.h"

namespace xd::ep {
namespace {

constexpr std::size_t kAligned = 16;

LlConfig config_of_rank_1() {
  xd_ll_config user XD_LL_CONFIG_INIT;
  user.num_ranks = 3;
  user.num_experts = 6;
  user.max_topk = 5;
  user.max_tokens_per_rank = 7;
  user.hidden = 16;
  LlConfig config = read_ll_config(&user, 0);
  config.local_experts = config.map().local_experts(1);
  return config;
}

// A plan of rank 1 with some items, in memory of just its size.
class Plan {
 public:
  Plan() {
    PlanHeader h{};
    h.rank = 1;
    h.ranks = config_.ranks;
    h.experts = config_.experts;
    h.local_experts = config_.local_experts;
    h.tokens = 2;
    h.topk = 3;
    h.layout = kSlotsLayout;
    h.alignment = 1;
    h.overflow_rank = h.bad_id_rank = -1;
    h.list_rows = 4;
    h.capacity = slots_per_expert(config_);
    const LlPlanMap map = ll_map_of(h);
    bytes_ = map.end;
    words_.resize(bytes_ / kAligned);
    std::memcpy(data(), &h, sizeof(h));
    for (std::int64_t i = 0; i < h.list_rows; ++i) {
      auto& item = *reinterpret_cast<LlItem*>(
          data() + map.items + static_cast<std::uint64_t>(i) * ll_item_bytes(h.topk));
      item.source_token = LlItem::name(static_cast<int>(i) % 3, 1000 + i);
      item.place = static_cast<std::uint32_t>(i);
    }
    seal_ll_plan(data());
  }
  std::byte* data() { return reinterpret_cast<std::byte*>(words_.data()); }
  std::size_t bytes() const { return bytes_; }
  const LlConfig& config() const { return config_; }
  std::string refusal(std::size_t bytes) {
    return test::refusal_of(
        [&] { LlPlanView::open(data(), bytes).require_binding(terms_of(config_, 1, 0)); });
  }

 private:
  struct alignas(kAligned) Word {
    std::byte bytes[kAligned];
  };
  LlConfig config_ = config_of_rank_1();
  std::size_t bytes_ = 0;
  std::vector<Word> words_;
};

TEST(LlPlanTest, ItemsComeBackAndFitIntoThePlansSize) {
  Plan plan;
  EXPECT_LE(plan.bytes(), plan_size(plan.config()));
  ASSERT_EQ(plan.refusal(plan.bytes()), "");
  const LlPlanView view = LlPlanView::open(plan.data(), plan.bytes());
  ASSERT_EQ(view.items(), 4);
  for (std::int64_t i = 0; i < view.items(); ++i) {
    EXPECT_EQ(view.item(i).source(), i % 3);
    EXPECT_EQ(view.item(i).token(), 1000 + i);
    EXPECT_EQ(view.item(i).place, i);
    // Items are apart, and the last one ends within the plan.
    EXPECT_LE(reinterpret_cast<const std::byte*>(view.item(i).weights(3) + 3),
              plan.data() + plan.bytes());
  }
}

TEST(LlPlanTest, DamageInFrontOfTheItemsIsFound) {
  Plan plan;
  PlanHeader header;
  std::memcpy(&header, plan.data(), sizeof(header));
  const std::uint64_t checked = extent_of(header).checked;
  for (std::uint64_t at = 0; at < checked; ++at) {
    plan.data()[at] ^= std::byte{4};
    EXPECT_NE(plan.refusal(plan.bytes()), "") << "byte " << at;
    plan.data()[at] ^= std::byte{4};
  }
  EXPECT_EQ(plan.refusal(plan.bytes()), "");
  test::expect_words(plan.refusal(plan.bytes() - 1), {"cut short"});
}

TEST(LlPlanTest, IsNoPlanOfPrepare) {
  Plan plan;
  test::expect_error(test::error_of([&] { PlanView::open(plan.data(), plan.bytes()); }),
                     XD_ERROR_INVALID_ARGUMENT, "made by xd_ll_dispatch");
}

TEST(RankBitsTest, CountLikeTheirBits) {
  std::mt19937_64 random(3);
  for (int i = 0; i < 1000; ++i) {
    const RankBits ranks{{random() & random(), random() | random()}};
    EXPECT_EQ(ranks.count(), std::popcount(ranks.word[0]) + std::popcount(ranks.word[1]));
    int below = 0;
    for (int r = 0; r < RankBits::kMostRanks; ++r) {
      EXPECT_EQ(ranks.count_below(r), below);
      below += ranks.has(r) ? 1 : 0;
    }
  }
}

}  // namespace
}  // namespace xd::ep
