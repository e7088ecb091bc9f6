// TransformerEngine's functions of expert parallelism against the library's own calls, bit by bit.
#include <crossdock/compat/te_ep.h>
#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "compat/te/ep_batch.h"
#include "compat/te/library.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using crossdock::te::as_nccl;

// Cases of the conformance grid, made into ones that TransformerEngine's functions can do.
std::vector<Case> te_cases() {
  std::vector<Case> cases;
  for (Case c : all_cases(world().num_ranks())) {
    c.layout = XD_EP_EXPERT_MAJOR;
    c.cargo = Cargo::payload;
    c.settle(Homes::even);
    c.zero_tail = ZeroTail::off;
    c.weights = true;
    // Here capacities are equal on all ranks.
    if (c.capacity != Capacity::larger) c.capacity = Capacity::bound;
    cases.push_back(c);
    if (cases.size() == 40) break;
  }
  return cases;
}

// All operations of the case by both interfaces, in equal groups but for what `adapt` changes in
// TransformerEngine's.
void compare(const Case& c, const std::function<void(NVTEEpGroupConfig&)>& adapt = nullptr,
             bool by_windows = false) {
  on_every_rank([&](Rank& rank) {
    SCOPED_TRACE(c.description());
    const bool symmetric = by_windows || c.placing != Placing::ordinary;
    const Place place = symmetric ? Place::symmetric : Place::ordinary;
    TeBatch direct(rank, c, place), batch(rank, c, place);
    direct.run_all_directly(rank.comm, c.config(rank.rank));
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    if (adapt) adapt(config);
    const TeGroup group(as_nccl(rank.comm), config);
    batch.use_group();
    batch.by_windows = by_windows;
    batch.run_all();
    batch.expect_equal(direct);
  });
}

TEST(TeEp, EveryOperationGivesTheBitsOfTheLibrarysOwnCall) {
  for (const Case& c : te_cases()) {
    compare(c);
    if (testing::Test::HasFailure()) return;
  }
}

// The tensors' own addresses are wrong here: only the windows say where they lie.
TEST(TeEp, WindowsSayWhereTensorsLieAndZeroCopyWorksInPlace) {
  compare(
      plain_case(world().num_ranks()), [](NVTEEpGroupConfig& config) { config.zero_copy = 1; },
      true);
}

// Layers of one group may differ in alignment and top-k, also in eager mode.
TEST(TeEp, LayersHaveAlignmentsAndTopKsOfTheirOwn) {
  for (const bool eager : {false, true}) {
    for (const int alignment : {1, 2, 16, 128}) {
      Case c = plain_case(world().num_ranks());
      c.alignment = alignment;
      compare(c, [&](NVTEEpGroupConfig& config) {
        if (eager) config.max_recv_tokens_per_rank = 0;
        config.num_topk = 8;
      });
    }
  }
}

TEST(TeEp, DropsTheRowsThatTheLibraryDrops) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.recv_capacity = 12;
    config.overflow = XD_EP_OVERFLOW_DROP;
    TeBatch direct(rank, c), batch(rank, c);
    direct.run_all_directly(rank.comm, config);
    const Tensor& total = *direct.batch().field(XD_EP_PREPARE, "total").tensor;
    EXPECT_GT(total.read_as<std::int64_t>()[0], config.recv_capacity);
    const TeGroup group(as_nccl(rank.comm), te_config(config));
    batch.use_group();
    batch.run_all();
    batch.expect_equal(direct);
  });
}

TEST(TeEp, PrepareAndDispatchIsTheTwoInOne) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch two(rank, c), one(rank, c);
    const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
    two.use_group();
    one.use_group();
    two.prepare();
    two.dispatch();
    one.prepare_and_dispatch();
    one.expect_equal(two);
  });
}

// "The backward direction": combine's derivative for callers that have no weights.
TEST(TeEp, DispatchWithoutWeightsIsTheDerivativeOfCombine) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch a(rank, c), b(rank, c);
    const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
    a.use_group();
    b.use_group();
    a.prepare();
    b.prepare();
    a.batch().dispatch_args.tokens = b.batch().combine_bwd_args.grad_out;
    a.batch().dispatch_args.topk_weights = a.batch().dispatch_args.recv_weights = nullptr;
    a.dispatch();
    b.combine_bwd();
    EXPECT_EQ(a.batch().field(XD_EP_DISPATCH, "recv_tokens").tensor->read(),
              b.batch().field(XD_EP_COMBINE_BWD, "grad_expert_out").tensor->read());
    EXPECT_TRUE(a.batch().field(XD_EP_DISPATCH, "recv_weights").tensor->untouched());
  });
}

// Rows of 64 e4m3 numbers with two e8m0 scales each.
struct Mxfp8 {
  Tensor rows, scales;
  Mxfp8(const Rank& rank, std::int64_t count)
      : rows(rank, kE4m3, {count, 64}), scales(rank, kE8m0, {count, 2}) {}
  void fill(int rank) {
    std::vector<std::uint8_t> codes(rows.buffer().bytes()), exponents(scales.buffer().bytes());
    for (std::size_t i = 0; i < codes.size(); ++i) {
      codes[i] = static_cast<std::uint8_t>(static_cast<std::size_t>(rank) * 31 + i * 7);
    }
    for (std::size_t i = 0; i < exponents.size(); ++i) {
      exponents[i] = static_cast<std::uint8_t>(static_cast<std::size_t>(rank) * 5 + i);
    }
    rows.write(codes);
    scales.write(exponents);
  }
  transformer_engine::TensorWrapper te() { return te_mxfp8_tensor(*rows.dl(), *scales.dl()); }
};

TEST(TeEp, Mxfp8RowsTravelWithTheirScales) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.hidden = 64;
    config.max_scale_bytes = 2;
    TeBatch direct(rank, c), batch(rank, c);
    const auto tokens = direct.batch().dispatch_args.tokens->shape[0];
    const auto received = direct.batch().dispatch_args.recv_tokens->shape[0];
    Mxfp8 sent(rank, tokens), expected(rank, received), forward(rank, received),
        backward(rank, received);
    sent.fill(rank.rank);
    {
      const Group group = make_group(rank.comm, config);
      ok(direct.batch().call(group.get(), XD_EP_PREPARE));
      xd_ep_dispatch_args& args = direct.batch().dispatch_args;
      args.tokens = sent.rows.dl();
      args.scales = sent.scales.dl();
      args.recv_tokens = expected.rows.dl();
      args.recv_scales = expected.scales.dl();
      ok(direct.batch().call(group.get(), XD_EP_DISPATCH));
    }
    const TeGroup group(as_nccl(rank.comm), te_config(config));
    batch.use_group();
    batch.prepare();
    const auto weights = te_tensor(batch.batch().dispatch_args.topk_weights);
    const auto recv_weights = te_tensor(batch.batch().dispatch_args.recv_weights);
    nvte_ep_dispatch(batch.handle().data(), nullptr, sent.te().data(), {}, weights.data(), {},
                     forward.te().data(), {}, recv_weights.data(), {}, rank.stream());
    nvte_ep_combine_bwd(batch.handle().data(), sent.te().data(), {}, backward.te().data(), {},
                        rank.stream());
    rank.memory->synchronize();
    EXPECT_EQ(forward.rows.read(), expected.rows.read());
    EXPECT_EQ(forward.scales.read(), expected.scales.read());
    EXPECT_EQ(backward.rows.read(), expected.rows.read());
    EXPECT_EQ(backward.scales.read(), expected.scales.read());
    EXPECT_EQ(batch.batch().field(XD_EP_DISPATCH, "recv_weights").tensor->read(),
              direct.batch().field(XD_EP_DISPATCH, "recv_weights").tensor->read());
  });
}

// Where the ranks meet through NCCL's communicator, which only GPUs have: see te/nccl_test.cc.
TEST(TeEp, ZeroCopyLeavesOutStagingMemoryWhereNoTensorCanBeInAWindowOfNccls) {
  using crossdock::te::detail::staging_of;
  NVTEEpGroupConfig config = NVTE_EP_GROUP_CONFIG_INIT;
  crossdock::te::detail::Comm of_nccl{}, of_crossdock{};
  of_nccl.owned = true;
  EXPECT_EQ(staging_of(config, of_crossdock), XD_EP_STAGING_AUTO);
  config.zero_copy = 1;
  EXPECT_EQ(staging_of(config, of_crossdock), XD_EP_STAGING_NONE);
  EXPECT_EQ(staging_of(config, of_nccl), XD_EP_STAGING_AUTO);
}

TEST(TeEp, AWindowOfNcclsLeavesTheTensorsOwnAddress) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch direct(rank, c), batch(rank, c);
    direct.run_all_directly(rank.comm, c.config(rank.rank));
    const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
    batch.use_group();
    batch.prepare();
    batch.dispatch();
    alignas(16) char of_nccl = 0;
    NVTECommWindow win{};
    win.window = reinterpret_cast<ncclWindow_vidmem*>(&of_nccl);
    win.offset = 4096;
    const auto rows = te_tensor(batch.batch().combine_args.expert_out);
    const auto out = te_tensor(batch.batch().combine_args.out);
    nvte_ep_combine(batch.handle().data(), rows.data(), win, out.data(), rank.stream());
    rank.memory->synchronize();
    EXPECT_EQ(batch.batch().field(XD_EP_COMBINE, "out").tensor->read(),
              direct.batch().field(XD_EP_COMBINE, "out").tensor->read());
  });
}

TEST(TeEp, WithoutNumTopkAGroupTakesTheLargest) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    config.struct_size = 0;  // as a caller of the first version
    config.num_topk = 1;     // beyond what such a caller has
    const TeGroup group(as_nccl(rank.comm), config);
    NVTEEpLayerConfig layer = NVTE_EP_LAYER_CONFIG_INIT;
    layer.top_k = XD_EP_MAX_TOPK;
    EXPECT_GT(nvte_ep_handle_mem_size(&layer), 0u);
  });
}

TEST(TeEp, HandleMemIsAPlan) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    NVTEEpGroupConfig config = te_config(c.config(rank.rank));
    config.num_topk = 5;
    xd_ep_config same = c.config(rank.rank);
    same.max_topk = 5;
    same.recv_capacity = config.max_recv_tokens_per_rank;
    std::size_t bytes = 0;
    ok(xd_ep_plan_size(&same, &bytes));
    const TeGroup group(as_nccl(rank.comm), config);
    TeBatch batch(rank, c);
    const NVTEEpLayerConfig layer = batch.layer();
    EXPECT_EQ(nvte_ep_handle_mem_size(&layer), bytes);
  });
}

// Optional outputs of prepare, and one pair alone in dispatch_bwd.
TEST(TeEp, OptionalTensorsMayBeLeftOut) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    TeBatch direct(rank, c), batch(rank, c);
    direct.run_all_directly(rank.comm, c.config(rank.rank));
    const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
    batch.use_group();
    const auto idx = te_tensor(batch.batch().prepare_args.topk_idx);
    const NVTEEpLayerConfig layer = batch.layer();
    nvte_ep_prepare(batch.handle().data(), idx.data(), nullptr, nullptr, &layer, rank.stream());
    const auto rows = te_tensor(batch.batch().dispatch_bwd_args.grad_recv_tokens);
    const auto tokens = te_tensor(batch.batch().dispatch_bwd_args.grad_tokens);
    nvte_ep_dispatch_bwd(batch.handle().data(), rows.data(), {}, nullptr, {}, tokens.data(),
                         nullptr, rank.stream());
    rank.memory->synchronize();
    EXPECT_EQ(batch.batch().field(XD_EP_DISPATCH_BWD, "grad_tokens").tensor->read(),
              direct.batch().field(XD_EP_DISPATCH_BWD, "grad_tokens").tensor->read());
    EXPECT_TRUE(batch.batch().untouched(XD_EP_PREPARE));
  });
}

TEST(TeEp, TheGroupBehindItIsThereWhileItLives) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    EXPECT_EQ(crossdock::te::ep_comm(), nullptr);
    for (int time = 0; time < 2; ++time) {
      const TeGroup group(as_nccl(rank.comm), te_config(c.config(rank.rank)));
      EXPECT_EQ(crossdock::te::ep_comm(), rank.comm);
      EXPECT_NE(crossdock::te::ep_group(), nullptr);
      EXPECT_EQ(group_seen_by_library(), crossdock::te::ep_group());
    }
    EXPECT_EQ(crossdock::te::ep_comm(), nullptr);
    EXPECT_EQ(crossdock::te::ep_group(), nullptr);
    nvte_ep_shutdown();  // again, with nothing there
  });
}

}  // namespace
}  // namespace xd::test
