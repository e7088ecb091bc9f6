// The contents of entry records, and the address that a remote one leads to.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <utility>
#include <vector>

#include "ep/bulk/family.h"
#include "ep/slots/family.h"
#include "turn/disagreement.h"
#include "turn/peer_address.h"

namespace xd::ep {
namespace {

Record a_record() {
  Record record;
  record.call.operation = XD_EP_DISPATCH;
  record.dtype = static_cast<std::uint8_t>(DType::bf16);
  record.flags = kHasWeights;
  record.row_bytes = 64;
  record.extra = ScaleRow{XD_EP_QUANTISE_NONE, 16}.word();
  record.rows = 5;
  record.fingerprint = 99;
  return record;
}

TEST(RecordTest, WhatMustBeEqualIsToldInWordsAndNothingElseIsCompared) {
  struct Case {
    const char* text;  // "" = may differ
    void (*change)(Record&);
  };
  const std::vector<Case> cases = {
      {"operation combine, here dispatch", [](Record& r) { r.call.operation = XD_EP_COMBINE; }},
      {"operation ?, here dispatch", [](Record& r) { r.call.operation = 77; }},
      {"its call failed with XD_ERROR_OVERFLOW",
       [](Record& r) { r.call.status = XD_ERROR_OVERFLOW; }},
      {"type float16, here bfloat16",
       [](Record& r) { r.dtype = static_cast<std::uint8_t>(DType::f16); }},
      {"with indices, here without", [](Record& r) { r.flags |= kHasIndices; }},
      {"without weights, here with them; with rows, here without",
       [](Record& r) { r.flags ^= kHasWeights | kHasRows; }},
      {"scales of one byte, here float32", [](Record& r) { r.flags ^= kByteScales; }},
      {"row bytes 80, here 64", [](Record& r) { r.row_bytes = 80; }},
      {"scale row bytes 32, here 16",
       [](Record& r) {
         r.extra = ScaleRow{XD_EP_QUANTISE_NONE, 32}.word();
       }},
      {"quantise MXFP8, here NONE",
       [](Record& r) {
         r.extra = ScaleRow{XD_EP_QUANTISE_MXFP8, 16}.word();
       }},
      {"a plan of another batch", [](Record& r) { r.fingerprint += 1 << 20; }},
      {"part 2, here 3", [](Record& r) { r.fingerprint -= 1; }},
      {"", [](Record& r) { r.flags |= kWideIndices; }},
      {"", [](Record& r) { r.rows = 6; }},
      {"", [](Record& r) { r.rows_in = turn::PeerAddress::in_heap(3, 256); }},
      {"", [](Record& r) { r.extra_in = turn::PeerAddress::shared(16); }},
  };
  for (const Case& c : cases) {
    Record other = a_record();
    c.change(other);
    const std::array<Record, 3> records = {a_record(), a_record(), other};
    const auto found = turn::disagreement<Family>(records, 0);
    EXPECT_EQ(static_cast<bool>(found), *c.text != '\0') << c.text;
    if (!found) continue;
    EXPECT_EQ(found.rank, 2);
    EXPECT_EQ(found.status, XD_ERROR_MISMATCH);
    EXPECT_EQ(found.text.find(std::string("ranks disagree; rank 2: ") + c.text), 0u) << found.text;
  }
}

TEST(LlRecordTest, WeightsThatOneRankAloneHasAreCalledSo) {
  LlRecord mine, theirs;
  mine.call.operation = theirs.call.operation = XD_LL_DISPATCH;
  theirs.flags = kWeighted;
  EXPECT_EQ(turn::difference<LlFamily>(mine, theirs), "with weights, here without");
  EXPECT_EQ(turn::difference<LlFamily>(theirs, mine), "without weights, here with them");
}

TEST(RemoteAddressTest, LeadsOnlyToWhereAllBytesAre) {
  using turn::PeerAddress;
  std::array<std::byte, 128> shared{}, heap{};
  const auto find = [&](PeerAddress address, std::uint64_t bytes, std::uint64_t alignment) {
    return turn::find_peer_memory(
        address, bytes, alignment, HeapRange{shared.data(), shared.size()},
        [&](std::uint64_t segment) {
          return segment == 2 ? HeapRange{heap.data(), heap.size()} : HeapRange{nullptr, 0};
        });
  };
  EXPECT_EQ(find(PeerAddress::shared(16), 112, 16), shared.data() + 16);
  EXPECT_EQ(find(PeerAddress::in_heap(2, 128), 0, 64), heap.data() + 128);
  EXPECT_EQ(find(PeerAddress::shared(16), 113, 16), nullptr) << "one byte too many";
  EXPECT_EQ(find(PeerAddress::shared(129), 0, 1), nullptr) << "begins behind the end";
  EXPECT_EQ(find(PeerAddress::shared(16), ~std::uint64_t{0}, 1), nullptr) << "wraps";
  EXPECT_EQ(find(PeerAddress::shared(20), 4, 8), nullptr) << "elements cannot begin there";
  EXPECT_EQ(find(PeerAddress::in_heap(1, 0), 0, 1), nullptr) << "no such segment";
  EXPECT_EQ(find(PeerAddress(), 0, 1), nullptr) << "none";
  EXPECT_FALSE(PeerAddress());
  EXPECT_TRUE(PeerAddress::shared(0));
}

TEST(GroupMapTest, WhatKernelsFindInPeersMemoryLiesAlikeWhateverTheirCapacitiesAndExperts) {
  Config mine;
  mine.ranks = 4;
  mine.experts = 16;
  const std::array<std::int32_t, 16> on_three{0, 0, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3};
  mine.expert_tables = ExpertTables::read(on_three.data(), 16, 4, "");
  mine.local_experts = 2;
  mine.max_topk = 3;
  mine.max_tokens = 100;
  mine.max_row_bytes = 512;
  mine.capacity = 1000;
  mine.keeps = {.lists = true, .items = true, .partials = true, .chunks = true};
  Config theirs = mine;
  theirs.capacity = 17;
  theirs.staging = false;
  theirs.local_experts = 0;
  const GroupMap a = GroupMap::make(mine), b = GroupMap::make(theirs);
  EXPECT_EQ(a.turn.entry, b.turn.entry);
  EXPECT_EQ(a.turn.done, b.turn.done);
  EXPECT_EQ(a.counts, b.counts);
  EXPECT_EQ(a.kept, b.kept);
  EXPECT_EQ(a.chunk, b.chunk);
  EXPECT_EQ(a.listed, b.listed);
  EXPECT_EQ(a.items, b.items);
  EXPECT_EQ(a.lists, b.lists);
  EXPECT_GE(a.scales, a.lists + 4 * GroupMap::list_words(mine) * sizeof(std::uint32_t));
  EXPECT_LT(b.end, a.end);
}

}  // namespace
}  // namespace xd::ep
