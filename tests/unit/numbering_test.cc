// Tests two steps of prepare on one rank: the choices of a batch, and the rows that they get.
#include "ep/cpu/numbering.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <vector>

namespace xd::ep::cpu {
namespace {

constexpr std::uint32_t kPoison = 0xA5A5A5A5;

// Two ranks with two experts each, two tokens with three choices each. Working memory is poisoned.
struct Batch {
  std::vector<std::int32_t> ids;
  Config config;
  ChoicesMemory choices_memory;
  NumberingMemory numbering_memory;
  std::vector<std::int64_t> capacities{4, 2};

  Batch(std::vector<std::int32_t> topk_idx, xd_ep_layout layout) : ids(std::move(topk_idx)) {
    config.ranks = 2;
    config.experts = 4;
    config.local_experts = 2;
    config.expert_tables = ExpertTables::even(4, 2);
    config.max_topk = 3;
    config.max_tokens = 2;
    config.layout = Layout::of(layout);
    const auto poison = [](auto& vector, std::size_t size) {
      vector.resize(size);
      std::memset(vector.data(), 0xA5, size * sizeof(vector[0]));
    };
    choices_memory.for_each_vector(config, poison);
    numbering_memory.for_each_vector(config, poison);
  }

  Choices choices() {
    Tensor tensor{};
    tensor.data = reinterpret_cast<std::byte*>(ids.data());
    tensor.type = DType::i32;
    tensor.cols = 3;
    tensor.rows = static_cast<std::int64_t>(ids.size()) / 3;
    return read_choices(tensor, config, choices_memory);
  }

  // The placement where this rank, the first of two, is alone with tokens.
  Placement placement(const Choices& choices) const {
    const CountLayout layout{config.experts, config.ranks};
    std::vector<std::uint32_t> table(layout.size() * 2, 0);
    std::ranges::copy(choices.counts, table.begin());
    Placement placement;
    placement.reserve(config);
    placement.place({layout, table}, config, capacities, {.rank = 0, .alignment = 1});
    return placement;
  }
};

constexpr std::uint32_t kNone = Choices::kNone;

TEST(Choices, ThatAreNoExpertsOrRepeatedDoNotCount) {
  Batch batch({3, 3, 1, -1, 4, -7}, XD_EP_EXPERT_MAJOR);
  const Choices choices = batch.choices();
  EXPECT_EQ(std::vector(choices.experts.begin(), choices.experts.end()),
            (std::vector<std::uint32_t>{3, kNone, 1, kNone, kNone, kNone}));
  // Experts, ranks, tokens, bad ids.
  EXPECT_EQ(std::vector(choices.counts.begin(), choices.counts.end()),
            (std::vector<std::uint32_t>{0, 1, 0, 1, 1, 1, 2, 3}));
}

TEST(Choices, RepeatedOnesAreNotBadInAGroupThatCollapsesThem) {
  Batch batch({2, 2, 2, 0, 9, 0}, XD_EP_EXPERT_MAJOR);
  batch.config.collapse = true;
  const Choices choices = batch.choices();
  EXPECT_EQ(choices.counts.back(), 1u);  // the 9
  EXPECT_EQ(choices.counts[2], 1u);
  EXPECT_EQ(choices.counts[0], 1u);
}

TEST(Numbering, IsTheSameEachTimeItIsMadeFromTheSameValues) {
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    Batch batch({2, 0, 3, 3, 2, 1}, layout);
    const Choices choices = batch.choices();
    const Placement placement = batch.placement(choices);
    const RowCodec codec(batch.capacities, Layout::of(layout), batch.config.local_experts);
    const Numbering::Rules rules{batch.config, codec, batch.capacities, 1};
    std::array<std::uint32_t, 6> first{}, second{};
    first.fill(kPoison);
    second.fill(kPoison);
    Numbering(rules, placement, batch.numbering_memory).number(choices, first.data());
    Numbering(rules, placement, batch.numbering_memory).number(choices, second.data());
    EXPECT_EQ(first, second);
    for (const std::uint32_t code : first) EXPECT_NE(code, kPoison);
  }
}

TEST(Numbering, GivesRowsByTokenAndNoneBeyondACapacity) {
  Batch batch({2, 0, 3, 3, 2, 1}, XD_EP_EXPERT_MAJOR);
  batch.config.overflow = XD_EP_OVERFLOW_DROP;
  const Choices choices = batch.choices();
  const Placement placement = batch.placement(choices);
  const RowCodec codec(batch.capacities, Layout::of(XD_EP_EXPERT_MAJOR), 2);
  Numbering numbering({batch.config, codec, batch.capacities, 1}, placement,
                      batch.numbering_memory);
  std::array<std::uint32_t, 6> codes{};
  codes.fill(kPoison);
  numbering.number(choices, codes.data());
  // Rank 0 has rows 0 and 1; rank 1, whose rows begin at code 4, has room for those of expert 2.
  EXPECT_EQ(codes, (std::array<std::uint32_t, 6>{4, 0, kNone, kNone, 5, 1}));
  EXPECT_EQ(std::vector(numbering.kept().begin(), numbering.kept().end()),
            (std::vector<std::uint32_t>{1, 1, 2, 0}));
}

TEST(Numbering, ListsTheRowsOfEachTokenAndMarksTheFirst) {
  Batch batch({2, 0, 3, 3, -1, 2}, XD_EP_EXPERT_MAJOR);
  batch.capacities = {4, 4};
  const Choices choices = batch.choices();
  const Placement placement = batch.placement(choices);
  const RowCodec codec(batch.capacities, Layout::of(XD_EP_EXPERT_MAJOR), 2);
  Numbering numbering({batch.config, codec, batch.capacities, 1}, placement,
                      batch.numbering_memory);
  std::array<std::uint32_t, 6> codes{}, list{};
  list.fill(kPoison);
  numbering.open_list(1, list.data());
  numbering.number(choices, codes.data());
  constexpr std::uint32_t kFirst = PlanHeader::kFirstOfToken;
  EXPECT_EQ(list, (std::array<std::uint32_t, 6>{4, 0 | kFirst, 2, 3 | kFirst, 1, kPoison}));
}

}  // namespace
}  // namespace xd::ep::cpu
