// Signalling NaNs: what is moved keeps every bit, what is computed is quiet.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <ostream>
#include <tuple>
#include <vector>

#include "conformance/batch.h"
#include "conformance/image.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

struct Payload {
  const char* name;
  DLDataType type;
  std::uint32_t signalling;  // with the sign, and a payload that does not touch the quiet bit
  std::uint32_t made_quiet;  // the same NaN with the quiet bit set
  std::uint32_t of_arithmetic;
};

constexpr Payload kPayloads[] = {
    {"bf16", kBf16, 0xff8c, 0xffcc, 0x7fc0},
    {"f16", kF16, 0xfcf9, 0xfef9, 0x7e00},
    {"f32", kF32, 0xff81234f, 0xffc1234f, 0x7fc00000},
};

void PrintTo(const Payload& payload, std::ostream* out) { *out << payload.name; }

// Every rank has four tokens of signalling NaNs. Token 0 goes to one expert, token 1 to two experts
// of one rank, token 2 to experts of two ranks (one, if there are no more), token 3 nowhere.
class SignallingNaN : public testing::TestWithParam<std::tuple<Payload, Place>> {
 protected:
  static constexpr std::int64_t kTokens = 4, kTopk = 2, kHidden = 64;

  const Payload& payload() const { return std::get<0>(GetParam()); }
  xd_ep_config config(const Rank& rank) const {
    xd_ep_config config = XD_EP_CONFIG_INIT;
    config.num_ranks = rank.num_ranks;
    config.num_experts = 2 * rank.num_ranks;
    config.max_topk = kTopk;
    config.max_tokens_per_rank = kTokens;
    config.dtype = payload().type;
    config.hidden = kHidden;
    return config;
  }
  std::vector<std::int32_t> ids(const Rank& rank) const {
    const int next = 2 * ((rank.rank + 1) % rank.num_ranks), own = 2 * rank.rank;
    return {next, -1, next, next + 1, own, rank.num_ranks > 1 ? next : own + 1, -1, -1};
  }
  // Every rank receives as many rows as rank 0's routing gives one rank.
  std::int64_t rows() const { return 5; }

  Tensor filled(const Rank& rank, std::int64_t rows, std::uint32_t code) const {
    Tensor tensor(rank, payload().type, {rows, kHidden}, std::get<1>(GetParam()));
    Image image(rows, kHidden, payload().type, std::byte{0});
    for (std::int64_t r = 0; r < rows; ++r) image.set_row(r, [&](auto, auto) { return code; });
    tensor.write(image.bytes());
    return tensor;
  }
  Tensor output(const Rank& rank, std::int64_t rows) const {
    return Tensor(rank, payload().type, {rows, kHidden}, std::get<1>(GetParam()));
  }
  // Row by row.
  void expect_rows(const char* name, const Tensor& tensor,
                   const std::vector<std::uint32_t>& codes) const {
    Image image(static_cast<std::int64_t>(codes.size()), kHidden, payload().type, kPoison);
    for (std::size_t r = 0; r < codes.size(); ++r) {
      image.set_row(static_cast<std::int64_t>(r), [&](auto, auto) { return codes[r]; });
    }
    expect_image(name, tensor, image);
  }

  struct Plan {
    Group group;
    Buffer bytes;
    template <class Args>
    void into(Args& args) const {
      set_plan(args, bytes);
    }
  };
  Plan prepare(const Rank& rank) const {
    const xd_ep_config wanted = config(rank);
    Plan plan{make_group(rank.comm, wanted), {}};
    plan.bytes = make_plan(rank, wanted);
    Tensor topk_idx(rank, kI32, {kTokens, kTopk});
    topk_idx.write(ids(rank));
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx.dl();
    plan.into(args);
    ok(finish(rank, plan.group.get(), xd_ep_prepare(plan.group.get(), &args, rank.stream())));
    return plan;
  }
};

TEST_P(SignallingNaN, KeepsItsBitsWhereRowsAreOnlyMoved) {
  on_every_rank([&](Rank& rank) {
    const Plan plan = prepare(rank);
    const std::vector<std::uint32_t> moved(static_cast<std::size_t>(rows()), payload().signalling);
    Tensor tokens = filled(rank, kTokens, payload().signalling);
    Tensor recv_tokens = output(rank, rows()), grad_expert_out = output(rank, rows());

    xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
    plan.into(dispatch);
    dispatch.tokens = tokens.dl();
    dispatch.recv_tokens = recv_tokens.dl();
    ok(finish(rank, plan.group.get(), xd_ep_dispatch(plan.group.get(), &dispatch, rank.stream())));
    expect_rows("recv_tokens", recv_tokens, moved);

    xd_ep_combine_bwd_args bwd = XD_EP_COMBINE_BWD_ARGS_INIT;
    plan.into(bwd);
    bwd.grad_out = tokens.dl();
    bwd.grad_expert_out = grad_expert_out.dl();
    ok(finish(rank, plan.group.get(), xd_ep_combine_bwd(plan.group.get(), &bwd, rank.stream())));
    expect_rows("grad_expert_out", grad_expert_out, moved);
  });
}

TEST_P(SignallingNaN, IsQuietInEverySum) {
  on_every_rank([&](Rank& rank) {
    const Plan plan = prepare(rank);
    const Payload& p = payload();
    // Tokens of one row keep sign and payload; tokens of two rows have the NaN that sums give.
    const std::vector<std::uint32_t> sums = {p.made_quiet, p.of_arithmetic, p.of_arithmetic, 0};
    const std::vector<std::uint32_t> products = {p.of_arithmetic, p.of_arithmetic, p.of_arithmetic,
                                                 0};
    Tensor expert_out = filled(rank, rows(), p.signalling);
    Tensor weights(rank, kF32, {rows()}, std::get<1>(GetParam()));
    weights.write(std::vector<float>(static_cast<std::size_t>(rows()), 1.0f));
    for (const bool weighted : {false, true}) {
      Tensor out = output(rank, kTokens);
      xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
      plan.into(combine);
      combine.expert_out = expert_out.dl();
      combine.weights = weighted ? weights.dl() : nullptr;
      combine.out = out.dl();
      ok(finish(rank, plan.group.get(), xd_ep_combine(plan.group.get(), &combine, rank.stream())));
      expect_rows("out", out, weighted ? products : sums);
    }
    Tensor grad_tokens = output(rank, kTokens);
    xd_ep_dispatch_bwd_args bwd = XD_EP_DISPATCH_BWD_ARGS_INIT;
    plan.into(bwd);
    bwd.grad_recv_tokens = expert_out.dl();
    bwd.grad_tokens = grad_tokens.dl();
    ok(finish(rank, plan.group.get(), xd_ep_dispatch_bwd(plan.group.get(), &bwd, rank.stream())));
    expect_rows("grad_tokens", grad_tokens, sums);
  });
}

TEST_P(SignallingNaN, IsQuietInWeightedGradients) {
  on_every_rank([&](Rank& rank) {
    const Plan plan = prepare(rank);
    const auto count = static_cast<std::size_t>(rows());
    Tensor grad_out = filled(rank, kTokens, payload().signalling);
    Tensor expert_out = filled(rank, rows(), payload().signalling);
    Tensor weights(rank, kF32, {rows()}, std::get<1>(GetParam()));
    weights.write(std::vector<float>(count, 1.0f));
    Tensor grad_expert_out = output(rank, rows());
    Tensor grad_weights(rank, kF32, {rows()}, std::get<1>(GetParam()));
    xd_ep_combine_bwd_args args = XD_EP_COMBINE_BWD_ARGS_INIT;
    plan.into(args);
    args.grad_out = grad_out.dl();
    args.expert_out = expert_out.dl();
    args.weights = weights.dl();
    args.grad_expert_out = grad_expert_out.dl();
    args.grad_weights = grad_weights.dl();
    ok(finish(rank, plan.group.get(), xd_ep_combine_bwd(plan.group.get(), &args, rank.stream())));
    expect_rows("grad_expert_out", grad_expert_out,
                std::vector<std::uint32_t>(count, payload().of_arithmetic));
    EXPECT_EQ(grad_weights.read_as<std::uint32_t>(), std::vector<std::uint32_t>(count, 0x7fc00000));
  });
}

INSTANTIATE_TEST_SUITE_P(Types, SignallingNaN,
                         testing::Combine(testing::ValuesIn(kPayloads),
                                          testing::Values(Place::ordinary, Place::symmetric)));

// Weights are moved as well, and so are their gradients.
TEST(SignallingNaNWeight, KeepsItsBits) {
  constexpr std::uint32_t kSignalling = 0xff81234f;
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const auto fill = [&](xd_ep_operation operation, const char* name) {
      Tensor& tensor = *batch.field(operation, name).tensor;
      tensor.write(std::vector<std::uint32_t>(tensor.buffer().bytes() / 4, kSignalling));
    };
    const auto count = [&](xd_ep_operation operation, const char* name) {
      const auto words = batch.field(operation, name).tensor->read_as<std::uint32_t>();
      return std::count(words.begin(), words.end(), kSignalling);
    };
    fill(XD_EP_DISPATCH, "topk_weights");
    ok(batch.call(group.get(), XD_EP_DISPATCH));
    fill(XD_EP_DISPATCH_BWD, "grad_recv_weights");
    ok(batch.call(group.get(), XD_EP_DISPATCH_BWD));
    std::int64_t received = 0, sent = 0;
    for (const Row& row : batch.routed().received(rank.rank).rows) received += !row.padding();
    const Choices& mine = batch.routed().choices(rank.rank);
    for (int t = 0; t < mine.tokens; ++t) {
      for (int k = 0; k < c.topk; ++k) sent += batch.routed().row_of(rank.rank, t, k).has_value();
    }
    EXPECT_EQ(count(XD_EP_DISPATCH, "recv_weights"), received);
    EXPECT_EQ(count(XD_EP_DISPATCH_BWD, "grad_topk_weights"), sent);
  });
}

}  // namespace
}  // namespace xd::test
