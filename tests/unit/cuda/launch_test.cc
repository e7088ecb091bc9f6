// The arithmetic behind launches on CUDA devices, tested without a device: chunks, pieces of rows,
// numbers of multiprocessors.
#include <algorithm>
#include <cstdlib>

#include <gtest/gtest.h>

#include <cstdint>

#include "base/tensor.h"
#include "ep/bulk/wire.h"
#include "ep/plan/cuda/launch_shape.h"
#include "ep/plan/cuda/row_pieces.h"
#include "ep/plan/cuda/sm_ledger.h"
#include "unit/errors.h"

namespace xd::ep::cuda {
namespace {

constexpr LaunchLimits kHopper{
    .sms = 132, .shared_bytes = std::size_t{227} * 1024, .ranks_on_device = 1};

constexpr QuantiseFormat kBlock128 = quantise_format(XD_EP_QUANTISE_FP8_BLOCK128);

TEST(ChunkFlagsTest, CoverAllTokensAndStayWithinTheirBound) {
  for (const ChunkFlags chunks : {sent_chunks(), sent_chunks(true), summed_chunks()}) {
    for (int tokens = 0; tokens <= 20000; tokens = tokens * 5 / 4 + 1) {
      const int each = chunks.tokens_per_chunk(tokens), count = chunks.count(tokens);
      EXPECT_GE(each, 1);
      EXPECT_LE(each, chunks.most_tokens);
      EXPECT_GE(count * each, tokens) << tokens;
      EXPECT_LT((count - 1) * each, tokens + (tokens == 0)) << tokens;
      for (const int bound : {tokens, tokens + 1, 2 * tokens, 20000}) {
        if (bound >= tokens) {
          for (const std::uint64_t row_bytes : {16u, 2048u, 14336u}) {
            const int flags = count * chunks.strips(tokens, row_bytes);
            EXPECT_LE(flags, chunks.bound(bound)) << tokens << " of " << bound;
            EXPECT_LE(flags, summed_chunks().bound(bound)) << "a group's flags of a source";
          }
        }
      }
    }
  }
}

// As combine computes the end of the last strip of one token's row, with all warps of the device.
TEST(CombineShapeTest, TheLongestRowsStripsFit32Bits) {
  EXPECT_EQ(longest_row_in_strips(kHopper.sms), (std::uint64_t{8} << 20) - 16);
  EXPECT_EQ(longest_row_in_strips(204), (std::uint64_t{8} << 20) - 16);
  EXPECT_EQ(longest_row_in_strips(205), (std::uint64_t{4} << 20) - 16);
  for (int sms = 1; sms <= 512; ++sms) {
    const std::uint64_t vectors = longest_row_in_strips(sms) / 16;
    std::uint64_t strips = 8;  // the most that partial sums come in
    ASSERT_EQ(strips, ChunkFlags::kMostStrips);
    while (strips < static_cast<std::uint64_t>(sms) * 2 * kCombineWarps) strips *= 2;
    EXPECT_LE(vectors * strips, UINT32_MAX) << sms;
    EXPECT_GT((vectors + 1) * strips, UINT32_MAX) << sms;
  }
}

TEST(RowPiecesTest, PiecesCoverTheRowAndFitTheirStages) {
  for (std::uint64_t bytes = 16; bytes <= (1u << 20); bytes = (bytes * 3 / 2 + 16) / 16 * 16) {
    const RowPieces row = RowPieces::make(bytes);
    EXPECT_LE(row.piece_bytes, RowPieces::kMostPieceBytes);
    EXPECT_GE(std::uint64_t{row.pieces} * row.piece_bytes, bytes);
    EXPECT_LT(std::uint64_t{row.pieces - 1} * row.piece_bytes, bytes) << "an empty piece";
    EXPECT_EQ(row.piece_bytes % RowPieces::kAlign, 0u);
    EXPECT_GE(row.warp_bytes, kStages * row.piece_bytes);
    EXPECT_EQ(row.warp_bytes % 128, 0u);
  }
}

TEST(RowPiecesTest, MoreWarpsShareTheArithmeticWhereRowsAreScaled) {
  const RowPieces moved = RowPieces::make(14336), scaled = RowPieces::make(14336, {}, 0, true);
  const Traffic traffic{.ranks = 2,
                        .tokens = 4096,
                        .topk = 8,
                        .row_bytes = 14336,
                        .row_per_expert = true,
                        .receives = true};
  Traffic scales = traffic;
  scales.scaled = true;
  EXPECT_EQ(dispatch_shape(traffic, moved, moved, 0, 128, kHopper).threads / 32, 7);
  EXPECT_EQ(dispatch_shape(scales, scaled, scaled, 0, 128, kHopper).threads / 32, 14);
}

TEST(LaunchShapeTest, EveryWarpThatScalesHasItsRingWhateverTheRow) {
  for (const std::uint64_t bytes : {16u, 1024u, 14336u, 28672u, 200000u}) {
    const RowPieces row = RowPieces::make(bytes, {}, 0, true);
    const Traffic traffic{.ranks = 2,
                          .tokens = 4096,
                          .topk = 8,
                          .row_bytes = bytes,
                          .row_per_expert = true,
                          .receives = true,
                          .scaled = true};
    const LaunchShape shape = dispatch_shape(traffic, row, row, 0, 128, kHopper);
    EXPECT_GE(shape.shared_bytes, shape.threads / 32 * sizeof(ScalerShared)) << bytes;
    EXPECT_LE(shape.shared_bytes + kStaticSharedBytes, kHopper.shared_bytes) << bytes;
  }
}

TEST(LaunchShapeTest, ScalingGetsMoreMultiprocessorsThanCopying) {
  const RowPieces row = RowPieces::make(14336, {}, 0, true);
  Traffic traffic{.ranks = 8,
                  .tokens = 4096,
                  .topk = 8,
                  .row_bytes = 14336,
                  .row_per_expert = true,
                  .receives = true};
  const int copying = dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks;
  traffic.scaled = true;
  EXPECT_GT(dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks, copying);
  traffic.ranks = traffic.topk = 2;
  EXPECT_EQ(dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks, 61)
      << "7.25 rows are read and written for 0.75 that cross";
}

TEST(RowPiecesTest, QuantisedPiecesHoldWholeBlocksAndTheirScales) {
  for (const auto way : {XD_EP_QUANTISE_FP8_BLOCK128, XD_EP_QUANTISE_FP8_BLOCK128_POW2,
                         XD_EP_QUANTISE_FP8_BLOCK128_E8M0, XD_EP_QUANTISE_MXFP8}) {
    const QuantiseFormat format = quantise_format(way);
    for (std::uint64_t columns = format.block; columns <= 65536; columns += 7ull * format.block) {
      const RowPieces row = RowPieces::make(columns * 2, format);
      EXPECT_EQ(row.piece_bytes / 2 % format.block, 0u);
      EXPECT_GE(row.scales_bytes, row.piece_bytes / 2 / format.block * format.scale_bytes);
      EXPECT_EQ(row.piece_bytes % 16, 0u) << "scales lie behind it";
      EXPECT_LT(std::uint64_t{row.pieces - 1} * row.piece_bytes, columns * 2);
    }
  }
}

TEST(RowPiecesTest, ScalesTravelBesideRowsWhereBulkCopiesCanCarryThem) {
  EXPECT_EQ(RowPieces::make(7168, {}, 224).beside_bytes, 224u);
  EXPECT_EQ(RowPieces::make(7168, {}, 7).beside_bytes, 7u);
  EXPECT_EQ(RowPieces::make(7168, {}, 16400).beside_bytes, 0u) << "more than a stage holds";
  EXPECT_EQ(RowPieces::make(14336, kBlock128, 224).beside_bytes, 0u) << "they are made on the way";
}

TEST(ChunkFlagsTest, FewTokensAreCutByColumnsIntoPartsOfSomeSize) {
  EXPECT_EQ(summed_chunks().strips(1, 14336), 8);
  EXPECT_EQ(summed_chunks().strips(128, 14336), 4);
  EXPECT_EQ(summed_chunks().strips(4096, 14336), 1);
  EXPECT_EQ(summed_chunks().strips(1, 2048), 2);
  EXPECT_EQ(summed_chunks().strips(1, 2047), 1);
  EXPECT_EQ(summed_chunks().strips(0, 14336), 8) << "no tokens: no flags, but defined";
}

TEST(LaunchShapeTest, FewerRanksNeedMoreMultiprocessorsToFillTheirLinks) {
  const RowPieces row = RowPieces::make(14336);
  int last = kHopper.sms;
  for (const int ranks : {2, 3, 4, 8}) {
    const Traffic traffic{.ranks = ranks, .tokens = 4096, .topk = 8, .row_bytes = 14336};
    const LaunchShape shape = dispatch_shape(traffic, row, row, 0, 128, kHopper);
    EXPECT_LT(shape.blocks, last) << ranks;
    EXPECT_EQ(shape.first_blocks, shape.blocks) << "nobody waits for rows";
    last = shape.blocks;
  }
}

TEST(LaunchShapeTest, MoreCopiesPerTokenGetMoreMultiprocessors) {
  const RowPieces row = RowPieces::make(14336);
  Traffic traffic{.ranks = 4, .tokens = 4096, .topk = 8, .row_bytes = 14336};
  const int dispatch = dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks;
  const int combine = combine_shape(traffic, 0, 128, kHopper).blocks;
  EXPECT_EQ(dispatch, 12) << "as many as fill the links of four ranks";
  EXPECT_EQ(combine, 11);
  const RowPieces quantised = RowPieces::make(14336, kBlock128);
  EXPECT_EQ(dispatch_shape(traffic, quantised, row, 0, 128, kHopper).blocks, dispatch)
      << "half the bytes cross, and the same are read";
  traffic.ranks = 2;
  EXPECT_GT(dispatch_shape(traffic, quantised, row, 0, 128, kHopper).blocks,
            dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks);
  traffic.ranks = 4;
  traffic.receives = true;  // by rank, staged
  EXPECT_GT(dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks, dispatch);
  EXPECT_GT(combine_shape(traffic, 0, 128, kHopper).blocks, combine);
  traffic.row_per_expert = true;
  const int by_expert = dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks;
  EXPECT_GT(by_expert, dispatch);
  traffic.topk = 2;
  EXPECT_LT(dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks, by_expert);
}

// Four ranks, top-8: a token has rows on 3.6 ranks, 2.7 of them others; of its 8 rows by expert 2
// are this rank's own.
TEST(LaunchShapeTest, BlocksAreDividedAsTheRowsThatTheyMove) {
  const RowPieces row = RowPieces::make(14336);
  Traffic traffic{.ranks = 4, .tokens = 4096, .topk = 8, .row_bytes = 14336, .receives = true};
  const auto sending = [&] {
    return dispatch_shape(traffic, row, row, 100, 128, kHopper).first_blocks;
  };
  const auto pushing = [&] { return combine_shape(traffic, 100, 128, kHopper).first_blocks; };
  traffic.staged = true;
  EXPECT_EQ(sending(), 57) << "by rank: 2.7 + 0.9 rows are sent, 2.7 are copied";
  EXPECT_EQ(pushing(), 61) << "3.6 rows are read and written, then read, and their sum written";
  traffic.row_per_expert = true;
  EXPECT_EQ(sending(), 44) << "by expert: 2.7 + 2 rows are sent, 6 are copied";
  EXPECT_EQ(pushing(), 72) << "8 rows are read";
  traffic.staged = false;
  EXPECT_EQ(sending(), 59) << "the first of a peer's rows is in its place";
  traffic.scaled = true;
  EXPECT_EQ(sending(), 25) << "2.7 rows are sent, all 8 are written at the owner";
  traffic.ranks = 1;
  traffic.scaled = false;
  EXPECT_EQ(sending(), 100) << "no rows come from peers";
}

// Two ranks, top-8: a token has a row on the other rank, and of its 8 rows by expert 4 are this
// rank's own.
TEST(LaunchShapeTest, BlocksBeginWithRowsForPeersUntilTheseFillTheLinks) {
  const RowPieces row = RowPieces::make(14336);
  Traffic traffic{.ranks = 2, .tokens = 4096, .topk = 8, .row_bytes = 14336, .receives = true};
  const auto sending = [&](int sms) {
    return dispatch_shape(traffic, row, row, sms, 128, kHopper).first_blocks;
  };
  const auto pushing = [&](int sms) {
    return combine_shape(traffic, sms, 128, kHopper).first_blocks;
  };
  traffic.row_per_expert = true;
  EXPECT_EQ(sending(24), 24) << "1 of 5 rows crosses";
  EXPECT_EQ(sending(48), 40) << "these fill the links";
  EXPECT_EQ(sending(100), 62) << "5 rows are sent, 3 are copied";
  EXPECT_EQ(pushing(32), 32) << "1 row crosses, 10 are read and written";
  EXPECT_EQ(pushing(64), 60);
  traffic.tokens = 128;
  EXPECT_EQ(sending(24), 15) << "as the rows are";
  EXPECT_EQ(pushing(32), 25);
  traffic.tokens = 4096;
  traffic.row_per_expert = false;
  traffic.staged = true;
  EXPECT_EQ(sending(12), 12) << "1 of 2 rows crosses";
  EXPECT_EQ(sending(24), 16);
  EXPECT_EQ(pushing(16), 9) << "every row that is pushed crosses";
  traffic.staged = false;
  traffic.coded = true;
  EXPECT_EQ(pushing(64), 16) << "1 row is put into codes, 1 too where 2 are added up";
  traffic.coded = traffic.receives = false;
  const int rows = combine_shape(traffic, 0, 128, kHopper).blocks;
  traffic.coded = traffic.receives = true;
  EXPECT_GT(combine_shape(traffic, 0, 128, kHopper).blocks, rows) << "links carry codes in half";
}

TEST(LaunchShapeTest, TheChoiceChangesSmoothlyWithTheNumberOfTokens) {
  const RowPieces row = RowPieces::make(14336);
  for (const bool by_expert : {false, true}) {
    Traffic traffic{.ranks = 2, .topk = 8, .row_bytes = 14336, .row_per_expert = by_expert};
    traffic.receives = by_expert;
    int dispatch = 0, combine = 0;
    for (int tokens = 1; tokens <= 16384; tokens += tokens / 64 + 1) {
      traffic.tokens = tokens;
      const int d = dispatch_shape(traffic, row, row, 0, 128, kHopper).blocks;
      const int c = combine_shape(traffic, 0, 128, kHopper).blocks;
      if (tokens > 1) {
        EXPECT_LE(std::abs(d - dispatch), 10) << tokens << " tokens";
        EXPECT_LE(std::abs(c - combine), 10) << tokens << " tokens";
      }
      dispatch = d;
      combine = c;
    }
    EXPECT_LE(std::max(dispatch, combine), 64) << "half a device";
  }
}

TEST(LaunchShapeTest, StaysWithinTheBudgetAndTheDevice) {
  for (const std::uint64_t bytes : {16u, 7168u, 14336u, 200000u}) {
    for (const bool quantise : {false, true}) {
      const QuantiseFormat format = quantise ? kBlock128 : QuantiseFormat{};
      const RowPieces row = RowPieces::make(bytes / 256 * 256 + 256, format);
      for (const int budget : {1, 2, 16, 128}) {
        for (const int tokens : {0, 1, 128, 4096}) {
          for (const int sms : {0, 1, 64}) {
            const Traffic traffic{
                .ranks = 4, .tokens = tokens, .topk = 8, .row_bytes = bytes, .receives = true};
            const LaunchShape sent = dispatch_shape(traffic, row, row, sms, budget, kHopper);
            const LaunchShape summed = combine_shape(traffic, sms, budget, kHopper);
            for (const LaunchShape& shape : {sent, summed}) {
              EXPECT_GE(shape.blocks, 1);
              EXPECT_LE(shape.blocks, budget);
              EXPECT_GE(shape.first_blocks, 1);
              EXPECT_LE(shape.first_blocks, shape.blocks);
              EXPECT_LE(shape.threads, 1024);
              EXPECT_LT(shape.shared_bytes, kHopper.shared_bytes);
            }
          }
        }
      }
    }
  }
}

// The most blocks of any operation of such a group, where the library chooses.
int most_blocks(const Traffic& traffic, int local_experts, const LaunchLimits& device) {
  const int budget = sm_budget(Config{}, device);
  const int experts = local_experts * traffic.ranks;
  int most = prepare_shape(experts, traffic.ranks, traffic.tokens, budget, device).blocks;
  most = std::max(most, combine_shape(traffic, 0, budget, device).blocks);
  const RowPieces plain = RowPieces::make(traffic.row_bytes);
  for (const bool quantise : {false, true}) {
    if (quantise && traffic.row_bytes % 256 != 0) continue;
    const RowPieces send =
        RowPieces::make(traffic.row_bytes, quantise ? kBlock128 : QuantiseFormat{});
    most = std::max(most, dispatch_shape(traffic, send, plain, 0, budget, device).blocks);
  }
  return most;
}

// Two operations of different groups, each on its own stream, wait for their peers with all their
// blocks; if one keeps the other from starting, ranks that begin with the other wait for ever.
TEST(LaunchShapeTest, AnyTwoOperationsFitBesideOneAnotherWhereTheLibraryChooses) {
  for (const int ranks_on_device : {1, 2, 3, 8}) {
    LaunchLimits device = kHopper;
    device.ranks_on_device = ranks_on_device;
    int most = 0;
    for (const bool by_expert : {false, true}) {
      for (const bool receives : {false, true}) {
        for (const int ranks : {1, 2, 4, 8, 72}) {
          for (const int topk : {1, 2, 8, 32}) {
            for (const std::uint64_t row_bytes : {16u, 2048u, 14336u, 65536u}) {
              for (int tokens = 0; tokens <= 16384; tokens += tokens / 4 + 1) {
                most = std::max(most, most_blocks({.ranks = ranks,
                                                   .tokens = tokens,
                                                   .topk = topk,
                                                   .row_bytes = row_bytes,
                                                   .row_per_expert = by_expert,
                                                   .receives = receives},
                                                  8, device));
              }
            }
          }
        }
      }
    }
    EXPECT_LE(2 * most * ranks_on_device, device.sms - 4) << ranks_on_device << " ranks";
    EXPECT_GE(2 * most * ranks_on_device, device.sms / 2) << "much of the device is left unused";
  }
}

TEST(LaunchShapeTest, RanksOfOneDeviceShareIt) {
  Config config;
  for (const int ranks : {1, 2, 3, 8, 40}) {
    LaunchLimits device = kHopper;
    device.ranks_on_device = ranks;
    EXPECT_LE(sm_budget(config, device) * ranks, device.sms) << ranks;
    EXPECT_GE(sm_budget(config, device), 1);
  }
  LaunchLimits device = kHopper;
  device.ranks_on_device = 4;
  config.num_sms = 33;
  EXPECT_EQ(sm_budget(config, device), 33);
  config.num_sms = 34;
  test::expect_error(test::error_of([&] { sm_budget(config, device); }), XD_ERROR_INVALID_ARGUMENT,
                     "expected at most 33");
}

// The range that CUDA is asked about: no more than a tensor has, or a view at the end of an
// allocation would be refused.
TEST(TensorExtentTest, IsFromTheFirstElementToTheLastWhateverTheStrides) {
  std::byte memory[4096];
  for (const std::int64_t rows : {1, 2, 5}) {
    for (const std::int64_t cols : {1, 3}) {
      for (const std::int64_t down : {0, 1, 3, 7, -7}) {
        for (const std::int64_t along : {0, 1, 5, -1}) {
          const Tensor tensor{.name = "it",
                              .data = memory + 2048,
                              .type = DType::f32,
                              .rows = rows,
                              .cols = cols,
                              .given = true,
                              .row_stride = down,
                              .col_stride = along};
          const std::byte *first = tensor.data, *end = tensor.data;
          for (std::int64_t r = 0; r < rows; ++r) {
            for (std::int64_t c = 0; c < cols; ++c) {
              const std::byte* element = tensor.data + 4 * (r * down + c * along);
              first = std::min(first, element);
              end = std::max(end, element + 4);
            }
          }
          const Tensor::Extent extent = tensor.extent();
          EXPECT_EQ(extent.first, first) << rows << " " << cols << " " << down << " " << along;
          EXPECT_EQ(extent.first + extent.bytes, end);
        }
      }
    }
  }
  EXPECT_EQ((Tensor{.rows = 0, .cols = 7}).extent().bytes, 0u);
}

TEST(SmLedgerTest, SumsUpTheGroupsThatLiveOnADevice) {
  SmLedger ledger;
  EXPECT_EQ(ledger.add(0, 64).sms, 64);
  EXPECT_EQ(ledger.add(1, 20).sms, 20) << "another device";
  const SmLedger::Sum both = ledger.add(0, 64);
  EXPECT_EQ(both.sms, 128);
  EXPECT_EQ(both.groups, 2);
  ledger.remove(0, 64);
  EXPECT_EQ(ledger.add(0, 8).sms, 72);
  EXPECT_TRUE(ledger.first_warning(0));
  EXPECT_FALSE(ledger.first_warning(0)) << "once";
  EXPECT_TRUE(ledger.first_warning(1));
}

TEST(SmLedgerTest, AGroupLeavesTheLedgerOnce) {
  const auto sum = [](int device) {
    const SmLedger::Sum all = SmLedger::instance().add(device, 0);
    SmLedger::instance().remove(device, 0);
    return all.sms;
  };
  constexpr int kDevice = 4711;
  {
    SmShare share(kDevice, 64, 128);
    EXPECT_EQ(sum(kDevice), 64);
    SmShare moved = std::move(share);
    EXPECT_EQ(sum(kDevice), 64);
    SmShare other;
    other = std::move(moved);
    EXPECT_EQ(sum(kDevice), 64);
  }
  EXPECT_EQ(sum(kDevice), 0);
}

TEST(SmLedgerTest, SaysWhatItKnows) {
  const std::string text = explain(3, {.groups = 2, .sms = 192}, 128);
  EXPECT_EQ(text,
            "CUDA device 3: 2 groups of this process may use 192 of 128 multiprocessors at once");
}

TEST(LaunchShapeTest, ExplainsItselfInOneLine) {
  const Traffic traffic{.ranks = 4, .tokens = 4096, .topk = 8, .row_bytes = 14336};
  const LaunchShape shape = combine_shape(traffic, 0, 128, kHopper);
  const std::string line = explain("combine", shape, traffic, 0, 128);
  EXPECT_EQ(line.find('\n'), std::string::npos);
  test::expect_words(line, {std::to_string(shape.blocks) + " multiprocessors (chosen"});
}

}  // namespace
}  // namespace xd::ep::cuda
