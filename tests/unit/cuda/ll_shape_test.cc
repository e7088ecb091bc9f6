// The memory of low-latency groups on CUDA devices, and the shapes of their launches: pure
// functions of sizes, which need no device.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "ep/slots/cuda/map.h"
#include "ep/slots/cuda/shape.h"
#include "ep/slots/record.h"

namespace xd::ep::cuda {
namespace {

// A group as it is served with: 128 tokens, 4 ranks, H=7168 of bf16, K=8, E=256.
LlSizes served() {
  return {.ranks = 4,
          .experts = 256,
          .local_experts = 64,
          .max_tokens = 128,
          .max_topk = 8,
          .stages = ll_stages(2),
          .masks = false,
          .max_row_bytes = std::uint64_t{7168} * 2,
          .max_partial_bytes = std::uint64_t{7168} * 2};
}

std::vector<LlSizes> many_sizes() {
  std::vector<LlSizes> all;
  for (const int ranks : {1, 2, 3, 8, 72}) {
    for (const int tokens : {1, 7, 128, 1024}) {
      for (const int topk : {1, 8, 9, 32}) {
        for (const int stages : {ll_stages(2), ll_stages(3), ll_stages(4)}) {
          for (const bool masks : {false, true}) {
            LlSizes s = served();
            s.ranks = ranks;
            s.experts = 4 * ranks + 28;
            s.local_experts = 5;
            s.max_tokens = tokens;
            s.max_topk = topk;
            s.stages = stages;
            s.masks = masks;
            s.max_row_bytes = topk == 9 ? 48 : 7168 * 2;
            all.push_back(s);
            s.has_slots = false;
            all.push_back(s);
          }
        }
      }
    }
  }
  return all;
}

std::string text(const LlSizes& s) {
  return std::to_string(s.ranks) + " ranks, " + std::to_string(s.max_tokens) + " tokens, K " +
         std::to_string(s.max_topk) + ", " + std::to_string(s.stages) + " stages" +
         (s.masks ? ", masks" : "") + (s.has_slots ? "" : ", no slots");
}

struct Part {
  const char* name;
  std::uint64_t first, bytes, alignment;
};

// Each part with the bytes that its users take, by the description in slots/cuda/map.h.
std::vector<Part> parts_of(const LlSizes& s) {
  const LlWordsMap map = LlWordsMap::make<LlRecord>(s);
  const auto ranks = static_cast<std::uint64_t>(s.ranks);
  const auto tokens = static_cast<std::uint64_t>(s.max_tokens);
  const std::uint64_t cells = static_cast<std::uint64_t>(s.stages) * ranks;
  const auto ids = static_cast<std::uint64_t>(LlIdWords::make(s.experts, s.max_topk).words);
  std::vector<Part> parts;
  for (const turn::PipelineMap& lane : map.pipeline) {
    parts.push_back({"entry", lane.entry, cells * 64, 64});
    parts.push_back({"credit", lane.credit, ranks * 16, 64});
  }
  parts.push_back({"bad_ids", map.bad_ids, cells * 8, 64});
  parts.push_back({"ids", map.ids, cells * tokens * ids * 8, 16});
  parts.push_back(
      {"weights", map.weights, cells * tokens * static_cast<std::uint64_t>(s.max_topk) * 8, 8});
  parts.push_back({"meet", map.meet, 2 * ranks * sizeof(LlMeeting), 16});
  parts.push_back({"rows", map.rows, cells * tokens * map.row_stride, 256});
  parts.push_back(
      {"partials", map.partials,
       static_cast<std::uint64_t>(s.stages) * tokens * s.partials_per_token() * map.partial_stride,
       256});
  return parts;
}

// The parts follow one another; returns the end of the last.
std::uint64_t expect_apart(const std::vector<Part>& parts) {
  std::uint64_t end = 0;
  for (const Part& part : parts) {
    EXPECT_GE(part.first, end) << part.name;
    EXPECT_EQ(part.first % part.alignment, 0u) << part.name;
    end = part.first + part.bytes;
  }
  return end;
}

TEST(LlWordsMap, HasPartsThatDoNotOverlapInTheOrderThatAResetNeeds) {
  for (const LlSizes& s : many_sizes()) {
    SCOPED_TRACE(text(s));
    const std::uint64_t end = expect_apart(parts_of(s));
    const LlWordsMap map = LlWordsMap::make<LlRecord>(s);
    EXPECT_LE(end, map.end);
    EXPECT_LE(map.end, end + 256);
    EXPECT_EQ(map.end % 16, 0u);  // a reset fills it by vectors of 16 bytes
  }
}

TEST(LlWordsMap, HasRoomForEveryRowAndItsScalesAndWeights) {
  for (const LlSizes& s : many_sizes()) {
    SCOPED_TRACE(text(s));
    const auto row = static_cast<std::uint32_t>(s.max_row_bytes);
    const std::uint32_t scales = row / 2 / 128 * 4;
    for (const bool quantised : {false, true}) {
      const LlRowForm form = ll_row_form(row, quantised ? scales : 0, quantised, s.max_topk);
      EXPECT_LE(form.payload() + form.tail_words() * 8, s.row_stride()) << quantised;
    }
    EXPECT_EQ(s.row_stride() % 16, 0u);
  }
}

// Escapes lie behind the scales, each word of the row has a bit of its own, and rows of half the
// group's bytes have room for all.
TEST(LlGivenForm, HasABitForEveryWord) {
  for (const LlSizes& s : many_sizes()) {
    SCOPED_TRACE(text(s));
    const auto row = static_cast<std::uint32_t>((s.max_row_bytes / 2 + 15) / 16 * 16);
    for (const std::uint32_t scale_bytes : {0u, 1u, 9u, row / 128 * 4, row / 8}) {
      const LlGivenForm form = LlGivenForm::of(row, scale_bytes);
      std::set<std::pair<std::uint32_t, std::uint32_t>> bits;
      for (std::uint32_t v = 0; v < row / 16; ++v) {
        for (const std::uint32_t half : {0u, 1u})
          bits.emplace(form.escapes_of_vector(v, half), v % 32);
      }
      for (std::uint32_t w = 0; w < form.scale_words; ++w) {
        bits.emplace(form.escapes_of_scales(w), w % 32);
      }
      EXPECT_EQ(bits.size(), row / 8 + form.scale_words);
      EXPECT_EQ(form.scale_words, (scale_bytes + 7) / 8);
      EXPECT_EQ(bits.begin()->first, form.scale_words);
      EXPECT_EQ(bits.rbegin()->first, form.words() - 1);
      const std::uint64_t weights = (static_cast<std::uint64_t>(s.max_topk) + 1) / 2;
      EXPECT_LE(row + (form.words() + weights) * 8, s.row_stride());
    }
  }
}

TEST(LlWordsMap, TakesNoMoreThanIsPromised) {
  LlSizes s = served();
  const std::uint64_t least = LlWordsMap::make<LlRecord>(s).end;
  EXPECT_LE(least, 80'000'000u);
  for (const int in_flight : {3, 4}) {
    const auto stages = static_cast<std::uint64_t>(ll_stages(in_flight));
    s.stages = ll_stages(in_flight);
    EXPECT_LE(LlWordsMap::make<LlRecord>(s).end, least / 5 * stages);
  }
}

TEST(LlIdWords, GiveBackEveryIdAndLeaveTheTagAlone) {
  for (const int experts : {1, 8, 255, 256, 257, 4095, 4096, 65535}) {
    for (const int topk : {1, 2, 8, 9, 32}) {
      const LlIdWords form = LlIdWords::make(experts, topk);
      EXPECT_EQ(form.words % 2, 0);
      EXPECT_GE(form.words * form.per_word, topk);
      EXPECT_LE(form.per_word * form.bits, 64 - LlIdWords::kTagBits);
      EXPECT_GE(form.none(), static_cast<std::uint32_t>(experts));  // no expert has that id
      for (const int id : {0, experts / 2, experts - 1}) {
        for (int place = 0; place < form.per_word; ++place) {
          const std::uint64_t word = static_cast<std::uint64_t>(id) << (place * form.bits) |
                                     static_cast<std::uint64_t>(ll_tag(7)) << 48;
          EXPECT_EQ(form.id(word, place), static_cast<std::uint32_t>(id));
          EXPECT_EQ(word >> 48, ll_tag(7));
        }
      }
    }
  }
}

TEST(LlTag, TellsApartOperationsThatFollowOneAnotherInASlot) {
  for (const std::uint64_t epoch : {1u, 2u, 0x7FFEu, 0x7FFFu, 0x8000u, 0xFFFFu}) {
    EXPECT_NE(ll_tag(epoch), 0u);
    for (const int stages : {5, 7, 9}) EXPECT_NE(ll_tag(epoch), ll_tag(epoch + stages));
  }
}

TEST(LlIdWords, LieInPlacesThatDoNotDependOnTheGroupWhereThereAreFew) {
  for (const int experts : {1, 8, 256, 4095}) {
    for (const int topk : {1, 2, 8}) EXPECT_TRUE(LlIdWords::make(experts, topk).few());
    for (const int topk : {9, 32}) EXPECT_FALSE(LlIdWords::make(experts, topk).few());
  }
  EXPECT_FALSE(LlIdWords::make(4096, 8).few());
}

TEST(LlSmemLayout, HasPartsThatDoNotOverlapAndFitsABlock) {
  constexpr std::size_t kShared = std::size_t{227} * 1024 - kStaticSharedBytes;
  constexpr std::uint64_t kMovers = kLlDispatchMovers;
  for (const LlSizes& s : many_sizes()) {
    SCOPED_TRACE(text(s));
    const LlSmemLayout room = ll_smem_layout(s, kShared);
    const auto candidates = static_cast<std::uint64_t>(s.ranks) * s.max_tokens;
    std::vector<Part> parts{
        {"places", room.places, room.has_places ? 4u * s.experts : 0u, 128},
        {"counts", room.counts,
         std::uint64_t{2} * s.ranks * (s.local_experts + (s.has_slots ? 0 : 1)), 128},
        {"zones", room.zones,
         s.has_slots ? 0 : std::uint64_t{4} * (std::max(s.ranks, s.local_experts) + 1), 128},
        {"hits", room.hits, (candidates + kMovers - 1) / kMovers * (kMovers / 32) * 4, 128},
        {"orders", room.orders, candidates, 128},
        {"names", room.names, room.has_names ? candidates * 4 : 0, 128},
        {"tails", room.tails, std::uint64_t{4} * room.tail_stride, 128},
        {"ids", room.ids,
         room.has_ids ? static_cast<std::uint64_t>(s.ranks) * room.ids_stride * 2 : 0, 128}};
    std::erase_if(parts, [](const Part& part) { return part.bytes == 0; });
    std::ranges::sort(parts, {}, &Part::first);
    EXPECT_LE(expect_apart(parts), room.end);
    EXPECT_GE(room.ids_topk, static_cast<std::uint32_t>(std::max(s.max_topk, 8)));
    EXPECT_GE(room.ids_stride, static_cast<std::uint32_t>(s.max_tokens) * room.ids_topk);
    const bool must_fit = room.has_ids || candidates <= 4096;
    EXPECT_TRUE(!must_fit || room.end <= kShared) << room.end;
  }
}

// All numbers next to a multiple are where a quotient that is one too small or too large shows.
TEST(LlDivisor, DividesAsTheLanguageDoes) {
  constexpr std::uint32_t kMost = 0x7FFFFFFF;
  for (const std::uint32_t by :
       {1u, 2u, 3u, 4u, 5u, 7u, 19u, 107u, 108u, 896u, 1023u, 9216u, 65536u, 4718592u, kMost}) {
    const LlDivisor divisor = LlDivisor::of(by);
    std::vector<std::uint32_t> numbers = {0, 1, 2, kMost - 1, kMost};
    for (std::uint32_t n = by; n < kMost - by && numbers.size() < 200000; n += by) {
      numbers.insert(numbers.end(), {n - 1, n, n + 1});
    }
    const std::uint32_t last = kMost / by * by;
    numbers.insert(numbers.end(), {last - 1, last});
    for (const std::uint32_t n : numbers) {
      ASSERT_EQ(divisor.divides(n), n / by) << "n " << n << ", by " << by;
    }
  }
}

TEST(LlShape, LeavesBlocksForEitherRole) {
  for (int blocks = kLlFewestBlocks; blocks <= 160; ++blocks) {
    SCOPED_TRACE(blocks);
    EXPECT_GE(ll_senders(blocks), 1);
    EXPECT_LT(ll_senders(blocks), blocks);
    EXPECT_LE(ll_send_blocks(blocks), blocks);
    EXPECT_GT(ll_send_blocks(blocks), ll_senders(blocks));  // one tells the routing
    if (blocks == kLlFewestBlocks) continue;
    EXPECT_GE(ll_senders(blocks), ll_senders(blocks - 1));
  }
  for (int blocks = kLlFewestBlocks; blocks < 12; ++blocks) {
    EXPECT_GE(blocks - ll_senders(blocks), ll_senders(blocks)) << blocks;
  }
  EXPECT_EQ(ll_senders(132), 24);
}

TEST(LlShape, GivesReceiversABlockForEachUnitUpToAll) {
  EXPECT_EQ(ll_receive_blocks(132), 48);
  EXPECT_EQ(ll_receive_blocks(132, 7), 48);
  EXPECT_EQ(ll_receive_blocks(132, 128), 128);
  EXPECT_EQ(ll_receive_blocks(132, 3000000000), 132);
  EXPECT_EQ(ll_receive_blocks(20), 20);
  EXPECT_EQ(ll_receive_blocks(20, 128), 20);
}

TEST(LlShape, LeavesRoomForASendHalfBesideReceiversOfRows) {
  EXPECT_EQ(ll_receive_blocks_of_rows(132, 2), 48);
  EXPECT_EQ(ll_receive_blocks_of_rows(132, 97), 50);
  EXPECT_EQ(ll_receive_blocks_of_rows(132, 128), 65);
  EXPECT_EQ(ll_receive_blocks_of_rows(132, 512), 132 - ll_send_blocks(132));
  EXPECT_EQ(ll_receive_blocks_of_rows(20, 512), 20);
  for (int blocks = 60; blocks <= 160; ++blocks) {
    EXPECT_LE(ll_receive_blocks_of_rows(blocks, 1 << 16) + ll_send_blocks(blocks), blocks);
  }
}

TEST(LlOrder, HasEveryTokenOfEveryRankOnceAndItsOwnFirst) {
  LlSizes s = served();
  for (const int tokens : {1, 47, 128}) {
    s.max_tokens = tokens;
    for (int rank = 0; rank < s.ranks; ++rank) {
      const std::vector<std::uint32_t> order = ll_order(s, rank, 24);
      const std::set<std::uint32_t> different(order.begin(), order.end());
      EXPECT_EQ(order.size(), static_cast<std::size_t>(s.ranks * tokens));
      EXPECT_EQ(different.size(), order.size());
      for (std::size_t i = 0; i < order.size(); ++i) {
        const auto source = static_cast<int>(order[i] >> 16);
        EXPECT_LT(source, s.ranks);
        EXPECT_LT(static_cast<int>(order[i] & 0xFFFF), tokens);
        EXPECT_EQ(source == rank, i < static_cast<std::size_t>(tokens)) << i;
      }
    }
  }
}

PlanTerms some_terms() {
  PlanTerms t{};
  t.rank = 1, t.ranks = 4, t.experts = 256, t.layout = 2, t.keeps_list = 1, t.keeps_items = 8;
  t.overflow = 1, t.local_experts = 64, t.capacity = 512, t.alignment = 4;
  t.capacities = 0x0123456789ABCDEF, t.expert_ranks = 0xFEDCBA9876543210;
  t.hosts = 0x1122334455667788;
  return t;
}

PlanHeader plan_head(const PlanTerms& t, std::uint64_t bytes) {
  PlanHeader h{};
  h.magic = PlanHeader::kMagic, h.version = PlanHeader::kVersion, h.alignment = 4;
  h.rank = t.rank, h.ranks = t.ranks, h.experts = t.experts, h.local_experts = t.local_experts;
  h.layout = t.layout, h.overflow = t.overflow, h.keeps_list = t.keeps_list;
  h.keeps_items = t.keeps_items, h.capacities = t.capacities, h.capacity = t.capacity;
  h.expert_ranks = t.expert_ranks, h.hosts = t.hosts, h.bytes = bytes;
  return h;
}

bool has_words_of(const PlanHeader& h, const LlPlanHead& head) {
  std::uint64_t words[LlPlanHead::kWords];
  std::memcpy(words, &h, sizeof(words));
  bool same = true;
  for (std::uint32_t w = 0; w < LlPlanHead::kWords; ++w) {
    same &= ((words[w] ^ head.word[w]) & LlPlanHead::mask(w)) == 0;
  }
  return same;
}

// Fields that may differ from batch to batch do not count; all others do.
TEST(LlPlanHead, HasTheWordsThatAllPlansOfAGroupShare) {
  const PlanTerms terms = some_terms();
  const LlPlanHead head = LlPlanHead::of(terms, 4096);
  PlanHeader batch = plan_head(terms, 4096);
  batch.tokens = 7, batch.topk = 3, batch.bad_id_rank = 2, batch.overflow_rank = -1;
  batch.list_rows = batch.recv_rows = batch.total_rows = 9, batch.bad_ids = 4;
  batch.fingerprint = 11, batch.epoch = 12, batch.checksum = 13;
  EXPECT_TRUE(has_words_of(batch, head));
  const auto differs = [&](auto PlanHeader::*field) {
    PlanHeader other = batch;
    other.*field += 1;
    return !has_words_of(other, head);
  };
  const auto all_differ = [&](auto... fields) { return (differs(fields) && ...); };
  EXPECT_TRUE(all_differ(&PlanHeader::magic, &PlanHeader::version, &PlanHeader::rank,
                         &PlanHeader::ranks, &PlanHeader::experts, &PlanHeader::layout,
                         &PlanHeader::alignment, &PlanHeader::overflow, &PlanHeader::keeps_list,
                         &PlanHeader::keeps_items, &PlanHeader::local_experts,
                         &PlanHeader::capacities, &PlanHeader::expert_ranks, &PlanHeader::hosts,
                         &PlanHeader::capacity, &PlanHeader::bytes));
}

}  // namespace
}  // namespace xd::ep::cuda
