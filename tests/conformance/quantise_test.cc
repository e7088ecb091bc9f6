// Rows that dispatch quantises: the bits of the definition, on every executor, for every number in
// every company. (The grid checks ordinary numbers in all circumstances.)
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "conformance/batch.h"
#include "conformance/image.h"
#include "conformance/quantised.h"
#include "support/float_modes.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// Every 31st bf16 number, shared between the ranks; all of them with XD_TEST_FULL=1.
std::uint32_t code_step(int num_ranks) {
  return static_cast<std::uint32_t>(num_ranks) * (full_tests() ? 1 : 31);
}

// Blocks whose largest finite magnitude has every exponent, with this mantissa; beside it every
// number up to it, infinities and NaNs.
std::vector<std::uint16_t> codes_of(const Rank& rank, std::size_t block, std::uint32_t mantissa) {
  const std::uint32_t step = code_step(rank.num_ranks);
  std::vector<std::uint16_t> codes;
  for (std::uint32_t exponent = 0; exponent < 255; ++exponent) {
    const std::uint32_t most = exponent << 7 | mantissa;
    codes.push_back(static_cast<std::uint16_t>(most));
    const auto first = (exponent + static_cast<std::uint32_t>(rank.rank)) % step;
    for (std::uint32_t code = first; code < 0x10000; code += step) {
      if (codes.size() % block == exponent % block) {
        codes.push_back(static_cast<std::uint16_t>(most | (code & 0x8000)));
      }
      const std::uint32_t magnitude = code & 0x7fff;
      if (magnitude <= most || magnitude >= 0x7f80) {
        codes.push_back(static_cast<std::uint16_t>(code));
      }
    }
    codes.resize((codes.size() + block - 1) / block * block);
  }
  return codes;
}

// A block for every finite magnitude that is the largest of its block, beside it some of those that
// are smaller.
std::vector<std::uint16_t> codes_of_all_largest(const Rank& rank, std::size_t block) {
  std::vector<std::uint16_t> codes;
  for (std::uint32_t most = 1; most < 0x7f80; ++most) {
    const auto sign = static_cast<std::uint32_t>(rank.rank) << 15;
    codes.push_back(static_cast<std::uint16_t>(most | (sign & 0x8000)));
    for (std::uint32_t i = 1; i < block; ++i) {
      codes.push_back(static_cast<std::uint16_t>(i * 0x9e37 % (most + 1) | (i % 2) << 15));
    }
  }
  return codes;
}

// One expert per rank, to which its left neighbour sends all tokens: rows arrive in their order.
class Ring {
 public:
  Ring(const Rank& rank, const QuantisedWay& way)
      : rank_(rank), way_(way), hidden_(way.block * (way.block == 128 ? 17 : 67)) {
    const std::int64_t most_codes = std::max(
        255 * (0x10000 / code_step(rank.num_ranks) * 34 / 32 + 2 * way.block), 0x7f80 * way.block);
    xd_ep_config config = XD_EP_CONFIG_INIT;
    config.num_experts = rank.num_ranks;
    config.max_topk = 1;
    config.max_tokens_per_rank = static_cast<std::int32_t>(most_codes / hidden_ + 1);
    config.hidden = static_cast<std::int32_t>(hidden_);  // max_scale_bytes stays 0
    config.num_ranks = rank.num_ranks;
    config.recv_capacity = config.max_tokens_per_rank;
    group_ = make_group(rank.comm, config);
    plan_ = make_plan(rank, config);
  }

  // `mode`: the calling thread's, if it is not the usual one.
  void expect_quantised(std::uint32_t mantissa, std::optional<FloatMode> mode = {}) {
    expect_codes(
        [&](const Rank& rank) {
          return codes_of(rank, static_cast<std::size_t>(way_.block), mantissa);
        },
        mode);
  }
  void expect_all_largest_quantised() {
    expect_codes(
        [&](const Rank& rank) {
          return codes_of_all_largest(rank, static_cast<std::size_t>(way_.block));
        },
        {});
  }

 private:
  template <class Codes>
  void expect_codes(Codes&& codes_of_rank, std::optional<FloatMode> mode) {
    const auto here = padded(codes_of_rank(rank_));
    Rank left = rank_;
    left.rank = (rank_.rank + rank_.num_ranks - 1) % rank_.num_ranks;
    const auto sent = padded(codes_of_rank(left));
    const auto rows = static_cast<std::int64_t>(sent.size()) / hidden_;
    prepare(static_cast<std::int64_t>(here.size()) / hidden_);

    Tensor tokens(rank_, kBf16, {static_cast<std::int64_t>(here.size()) / hidden_, hidden_});
    tokens.write(here);
    Tensor recv_tokens(rank_, kE4m3, {rows, hidden_});
    Tensor recv_scales(rank_, way_.scale_type, {rows, hidden_ / way_.block});
    xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
    set_plan(args, plan_);
    args.tokens = tokens.dl();
    args.recv_tokens = recv_tokens.dl();
    args.recv_scales = recv_scales.dl();
    args.quantise = way_.way;
    ok(finish(rank_, group_.get(), call(args, mode)));
    expect_blocks(sent, recv_tokens, recv_scales);
  }

  xd_status call(const xd_ep_dispatch_args& args, std::optional<FloatMode> mode) const {
    if (!mode) return xd_ep_dispatch(group_.get(), &args, rank_.stream());
    const InFloatMode scope(*mode);
    const xd_status status = xd_ep_dispatch(group_.get(), &args, rank_.stream());
    if (!rank_.asynchronous()) {
      EXPECT_TRUE(scope.untouched()) << "the caller's modes";
    }
    return status;
  }

  std::vector<std::uint16_t> padded(std::vector<std::uint16_t> codes) const {
    const auto row = static_cast<std::size_t>(hidden_);
    codes.resize((codes.size() + row - 1) / row * row);
    return codes;
  }

  void prepare(std::int64_t tokens) {
    Tensor topk_idx(rank_, kI32, {tokens, 1});
    topk_idx.write(std::vector<std::int32_t>(static_cast<std::size_t>(tokens),
                                             (rank_.rank + 1) % rank_.num_ranks));
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx.dl();
    set_plan(args, plan_);
    ok(finish(rank_, group_.get(), xd_ep_prepare(group_.get(), &args, rank_.stream())));
  }

  void expect_blocks(const std::vector<std::uint16_t>& sent, const Tensor& tokens,
                     const Tensor& scales) const {
    Image elements(tokens.shape()[0], hidden_, kE4m3, kPoison);
    Image scale_image(scales.shape()[0], scales.shape()[1], way_.scale_type, kPoison);
    for (std::size_t at = 0; at < sent.size(); at += static_cast<std::size_t>(way_.block)) {
      const QuantisedBlock block =
          quantised_block(way_, std::span(sent).subspan(at, static_cast<std::size_t>(way_.block)));
      const auto row = static_cast<std::int64_t>(at) / hidden_;
      const std::int64_t column = static_cast<std::int64_t>(at) % hidden_;
      for (std::int64_t i = 0; i < way_.block; ++i) {
        elements.set(row, column + i, block.elements[static_cast<std::size_t>(i)]);
      }
      scale_image.set(row, column / way_.block, block.scale);
    }
    expect_image("recv_tokens", tokens, elements);
    expect_image("recv_scales", scales, scale_image);
  }

  const Rank& rank_;
  const QuantisedWay way_;
  const std::int64_t hidden_;  // for MXFP8 no multiple of 128
  Group group_;
  Buffer plan_;
};

class EveryWay : public testing::TestWithParam<xd_ep_quantise> {};

TEST_P(EveryWay, GivesTheBitsOfTheDefinitionForEveryNumberBesideEveryLargestOne) {
  const QuantisedWay way = quantised_way(GetParam());
  on_every_rank([&](Rank& rank) {
    Ring ring(rank, way);
    // 0x60 is the mantissa of 448.
    for (const std::uint32_t mantissa : {0x00u, 0x5fu, 0x60u, 0x61u, 0x7fu}) {
      SCOPED_TRACE("mantissa " + std::to_string(mantissa));
      ring.expect_quantised(mantissa);
    }
  });
}

TEST_P(EveryWay, GivesTheScaleOfEveryLargestNumber) {
  const QuantisedWay way = quantised_way(GetParam());
  on_every_rank([&](Rank& rank) { Ring(rank, way).expect_all_largest_quantised(); });
}

TEST_P(EveryWay, GivesThemInEveryModeOfTheCallingThread) {
  const QuantisedWay way = quantised_way(GetParam());
  on_every_rank([&](Rank& rank) {
    Ring ring(rank, way);
    for (const FloatMode mode : {FloatMode::flushing, FloatMode::upward}) {
      SCOPED_TRACE(mode == FloatMode::flushing ? "flushing" : "upward");
      ring.expect_quantised(0x61, mode);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Ways, EveryWay, testing::ValuesIn(kWaysToQuantise));

// Blocks without a finite number that is not zero, and what the table of ep.h says of those.
TEST(QuantisedBlockReference, HasTheScalesOfTheHeadersTable) {
  const std::vector<std::uint16_t> zeros(128, 0), infinities(128, 0xff80), nans(128, 0x7f81);
  for (const auto& codes : {zeros, infinities, nans}) {
    const std::uint32_t expected[] = {0x3f800000, 0x3f800000, 0, 0};
    for (std::size_t i = 0; i < std::size(kWaysToQuantise); ++i) {
      EXPECT_EQ(quantised_block(quantised_way(kWaysToQuantise[i]), codes).scale, expected[i]);
    }
  }
  // 448 has the scale 1, the next number 2 where scales are powers.
  for (const auto& [code, byte] : {std::pair{0x43e0, 127}, std::pair{0x43e1, 128}}) {
    const std::vector<std::uint16_t> codes(32, static_cast<std::uint16_t>(code));
    EXPECT_EQ(quantised_block(quantised_way(XD_EP_QUANTISE_MXFP8), codes).scale,
              static_cast<std::uint32_t>(byte));
  }
}

}  // namespace
}  // namespace xd::test
