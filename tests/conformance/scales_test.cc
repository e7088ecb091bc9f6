// Rows of scales of any length: short ones travel beside their rows, long ones by themselves.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <tuple>
#include <vector>

#include "conformance/batch.h"
#include "conformance/image.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr std::int64_t kTokens = 3, kHidden = 64;

using Circumstances = std::tuple<xd_ep_layout, Place, DLDataType>;

// One expert per rank, to which its left neighbour sends all tokens: rows arrive in their order.
class ScaleRows : public testing::TestWithParam<Circumstances> {
 protected:
  DLDataType scale_type() const { return std::get<2>(GetParam()); }

  xd_ep_config config(const Rank& rank, std::int64_t columns) const {
    xd_ep_config config = XD_EP_CONFIG_INIT;
    config.num_ranks = rank.num_ranks;
    config.num_experts = rank.num_ranks;
    config.max_topk = 1;
    config.max_tokens_per_rank = static_cast<std::int32_t>(kTokens);
    config.hidden = static_cast<std::int32_t>(kHidden);
    config.dtype = kBf16;
    config.layout = std::get<0>(GetParam());
    config.max_scale_bytes =
        static_cast<std::int32_t>(columns * static_cast<std::int64_t>(element_bytes(scale_type())));
    return config;
  }

  // The scales that rank `source` sends.
  Image scales_of(int source, std::int64_t columns) const {
    Image image(kTokens, columns, scale_type(), std::byte{0});
    for (std::int64_t row = 0; row < kTokens; ++row) {
      image.set_row(row, [&](std::int64_t r, std::int64_t column) {
        return any_code({test_seed(), Content::scales, source, r, column});
      });
    }
    return image;
  }
};

Buffer prepared_plan(const Rank& rank, xd_ep_group* group, const xd_ep_config& config) {
  Buffer plan = make_plan(rank, config);
  Tensor topk_idx(rank, kI32, {kTokens, 1});
  topk_idx.write(std::vector<std::int32_t>(kTokens, (rank.rank + 1) % rank.num_ranks));
  xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = topk_idx.dl();
  set_plan(args, plan);
  ok(finish(rank, group, xd_ep_prepare(group, &args, rank.stream())));
  return plan;
}

// A stage of the CUDA executor holds 16 KiB, and its words are of 4 bytes. Every rank's tensor of
// received scales begins at another byte of a word.
TEST_P(ScaleRows, OfEveryLengthArriveAtAnyElementOfEveryRanksTensor) {
  const Place place = std::get<1>(GetParam());
  const DLDataType type = scale_type();
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE("seed " + std::to_string(test_seed()));
    const int left = (rank.rank + rank.num_ranks - 1) % rank.num_ranks;
    for (const std::int64_t bytes : {16380, 16384, 16388, 16400, 20004, 65536}) {
      SCOPED_TRACE("scale rows of " + std::to_string(bytes) + " bytes");
      const std::int64_t columns = bytes / static_cast<std::int64_t>(element_bytes(type));
      const xd_ep_config wanted = config(rank, columns);
      const Group group = make_group(rank.comm, wanted);
      const Buffer plan = prepared_plan(rank, group.get(), wanted);
      Tensor tokens(rank, kE4m3, {kTokens, kHidden});
      Tensor recv_tokens(rank, kE4m3, {kTokens, kHidden}, place);
      tokens.write(std::vector<std::uint8_t>(kTokens * kHidden, 0x38));
      Tensor scales(rank, type, {kTokens, columns});  // aligned to words
      scales.write(scales_of(rank.rank, columns).bytes());
      const Spread shifted{.shift = 1 + rank.rank % 3, .strides = {}};
      Tensor recv_scales(rank, type, {kTokens, columns}, place, shifted);
      xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
      set_plan(args, plan);
      args.tokens = tokens.dl();
      args.scales = scales.dl();
      args.recv_tokens = recv_tokens.dl();
      args.recv_scales = recv_scales.dl();
      ok(finish(rank, group.get(), xd_ep_dispatch(group.get(), &args, rank.stream())));
      expect_image("recv_scales", recv_scales, scales_of(left, columns));
      EXPECT_TRUE(recv_scales.gaps_intact() && recv_scales.buffer().guards_intact());
    }
  });
}

INSTANTIATE_TEST_SUITE_P(All, ScaleRows,
                         testing::Combine(testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR),
                                          testing::Values(Place::ordinary, Place::symmetric),
                                          testing::Values(kE8m0, kF32)));

}  // namespace
}  // namespace xd::test
