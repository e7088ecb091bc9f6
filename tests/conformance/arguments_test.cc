// A bad argument of one rank: INVALID_ARGUMENT there, naming it; MISMATCH naming that rank on all
// others, at once; nothing written; and the group goes on.
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <string>
#include <utility>

#include "conformance/batch.h"
#include "conformance/damaged_tensor.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

using Clock = std::chrono::steady_clock;

constexpr xd_ep_operation kOperations[] = {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE,
                                           XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD};

// The highest rank makes the mistake; a launch with one rank has no peers to tell.
int guilty_rank(const Rank& rank) { return rank.num_ranks - 1; }

// Calls `operation` and expects it to fail as the guilty rank's fault. `named`: what the guilty
// rank's text must mention.
void expect_refused(const Rank& rank, xd_ep_group* group, Batch& batch, xd_ep_operation operation,
                    const std::string& named) {
  const auto start = Clock::now();
  const Outcome outcome = batch.call(group, operation);
  EXPECT_LT(Clock::now() - start, std::chrono::seconds(10)) << "waited for the timeout";
  if (rank.rank == guilty_rank(rank)) {
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions(named)) << "expected '" << named << "' in: " << outcome.text;
  } else {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("rank " + std::to_string(guilty_rank(rank)))) << outcome.text;
  }
  EXPECT_EQ(outcome.met.status, outcome.status) << outcome.met.text;
  EXPECT_TRUE(batch.untouched(operation)) << "an output was written";
  EXPECT_TRUE(batch.guards_intact());
}

// Also after a refused prepare, which leaves no plan behind.
void make_plan(xd_ep_group* group, Batch& batch) {
  batch.prepare(group);
  batch.poison_outputs();
}

void expect_group_works(const Rank& rank, const Case& c, xd_ep_group* group) {
  Step(rank, c, group, 1).run_all();
}

const std::vector<Damage>& all_damages() {
  static const std::vector<Damage> all = damages({
      {"Float8WithoutVariant",
       [](DamagedTensor& d) {
         d.tensor.dtype = DLDataType{8, 8, 1};
       }},
      {"TooManyExtents", add_extent},
      {"NotContiguous", spread_out},
  });
  return all;
}

class BadTensor : public testing::TestWithParam<xd_ep_layout> {};

TEST_P(BadTensor, IsRefusedByNameAndNamesTheRankToPeers) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  c.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    std::size_t turn = 0;
    for (Batch::Field& field : batch.fields()) {
      ++turn;
      for (std::size_t number = 0; number < all_damages().size(); ++number) {
        // Every field with every damage on two ranks; on others each field with one of them.
        if (rank.num_ranks != 2 && number != turn % all_damages().size()) continue;
        const Damage& damage = all_damages()[number];
        const bool any_strides = std::string(field.name) == "scales";
        if (any_strides && std::string(damage.name) == "NotContiguous") continue;
        SCOPED_TRACE(std::string(damage.name) + " " + field.name + " of operation " +
                     std::to_string(field.operation));
        const DLTensor* original = *field.slot;
        DamagedTensor damaged(*original);
        damage.apply(damaged);
        if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
        expect_refused(rank, group.get(), batch, field.operation, field.name);
        *field.slot = original;
        if (field.operation == XD_EP_PREPARE) make_plan(group.get(), batch);
      }
    }
    expect_group_works(rank, c, group.get());
  });
}

TEST_P(BadTensor, WithWrongExtentsIsRefused) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  c.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    for (Batch::Field& field : batch.fields()) {
      if (field.operation == XD_EP_PREPARE && field.role == Batch::Role::token_input) continue;
      SCOPED_TRACE(std::string(field.name) + " of operation " + std::to_string(field.operation));
      const DLTensor* original = *field.slot;
      DamagedTensor damaged(*original);
      // One token too many, or one receive row too few.
      const bool receive =
          field.role == Batch::Role::receive_input || field.role == Batch::Role::receive_output;
      damaged.shape[0] += receive ? -1 : 1;
      if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
      expect_refused(rank, group.get(), batch, field.operation, field.name);
      *field.slot = original;
      if (field.operation == XD_EP_PREPARE) make_plan(group.get(), batch);
    }
    expect_group_works(rank, c, group.get());
  });
}

// Every tensor is either needed itself, or by another that is given.
TEST_P(BadTensor, ThatIsMissingIsRefused) {
  Case c = plain_case(world().num_ranks());
  c.layout = GetParam();
  c.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    for (Batch::Field& field : batch.fields()) {
      const std::string name = field.name;
      const bool optional_alone = (field.operation == XD_EP_PREPARE && field.output()) ||
                                  name == "recv_topk_idx" ||
                                  (field.operation == XD_EP_COMBINE && name == "weights") ||
                                  (field.operation == XD_EP_COMBINE_BWD && name == "grad_weights");
      if (optional_alone) continue;
      SCOPED_TRACE(name + " of operation " + std::to_string(field.operation));
      const DLTensor* original = *field.slot;
      if (rank.rank == guilty_rank(rank)) *field.slot = nullptr;
      expect_refused(rank, group.get(), batch, field.operation, name);
      *field.slot = original;
      if (field.operation == XD_EP_PREPARE) make_plan(group.get(), batch);
    }
    expect_group_works(rank, c, group.get());
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, BadTensor, testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

// Arguments beside the tensors: struct, version, plan.
struct Mistake {
  const char* named;
  std::function<void(Batch&)> make;
};

TEST(BadArguments, BesideTensorsAreRefused) {
  const Case c = plain_case(world().num_ranks());
  const Mistake mistakes[] = {
      {"struct_size", [](Batch& b) { b.dispatch_args.struct_size = 0; }},
      {"plan", [](Batch& b) { b.dispatch_args.plan = nullptr; }},
      {"plan", [](Batch& b) { b.dispatch_args.plan_bytes = 0; }},
      {"plan", [](Batch& b) { b.dispatch_args.plan_bytes = 64; }},
      {"plan",
       [](Batch& b) {
         b.dispatch_args.plan = static_cast<const std::byte*>(b.dispatch_args.plan) + 4;
       }},
  };
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const xd_ep_dispatch_args good = batch.dispatch_args;
    for (const Mistake& mistake : mistakes) {
      SCOPED_TRACE("mistake " + std::to_string(&mistake - mistakes));
      if (rank.rank == guilty_rank(rank)) mistake.make(batch);
      expect_refused(rank, group.get(), batch, XD_EP_DISPATCH, mistake.named);
      batch.dispatch_args = good;
    }
    expect_group_works(rank, c, group.get());
  });
}

// A row per token of the batch, and a row for each that it brings.
struct RowsOf {
  Tensor sent, received;
  RowsOf(const Rank& rank, const Batch& batch, DLDataType sent_type, DLDataType received_type,
         std::int64_t columns, std::int64_t received_columns)
      : sent(rank, sent_type, {batch.dispatch_args.tokens->shape[0], columns}),
        received(rank, received_type,
                 {batch.dispatch_args.recv_tokens->shape[0], received_columns}) {}
};

TEST(BadArguments, AWayToQuantiseThatDoesNotFitTheTensorsIsRefused) {
  Case c = plain_case(world().num_ranks());
  c.row_units = 32;
  struct Wrong {
    const char* named;
    int way;
    DLDataType tokens, recv_tokens, recv_scales;
    std::int64_t columns, scale_columns;
  };
  const Wrong kinds[] = {
      {"quantise = XD_EP_QUANTISE_NONE", 0, kBf16, kE4m3, kF32, 256, 2},
      {"quantise = 5", 5, kBf16, kE4m3, kF32, 256, 2},
      {"quantise = -1", -1, kBf16, kE4m3, kF32, 256, 2},
      {"tokens: is float16", XD_EP_QUANTISE_MXFP8, kF16, kE4m3, kE8m0, 256, 8},
      {"recv_tokens: is bfloat16", XD_EP_QUANTISE_MXFP8, kBf16, kBf16, kE8m0, 256, 8},
      {"recv_tokens: is float8_e5m2", XD_EP_QUANTISE_MXFP8, kBf16, kE5m2, kE8m0, 256, 8},
      {"recv_scales: is float32", XD_EP_QUANTISE_MXFP8, kBf16, kE4m3, kF32, 256, 8},
      {"recv_scales: is float8_e8m0fnu", XD_EP_QUANTISE_FP8_BLOCK128_POW2, kBf16, kE4m3, kE8m0, 256,
       2},
      {"recv_scales: has 2 columns, expected 8 (hidden / 32)", XD_EP_QUANTISE_MXFP8, kBf16, kE4m3,
       kE8m0, 256, 2},
      {"expected a multiple of 32", XD_EP_QUANTISE_MXFP8, kBf16, kE4m3, kE8m0, 240, 7},
      {"expected a multiple of 128", XD_EP_QUANTISE_FP8_BLOCK128_E8M0, kBf16, kE4m3, kE8m0, 192, 1},
  };
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    const xd_ep_dispatch_args good = batch.dispatch_args;
    for (const Wrong& wrong : kinds) {
      SCOPED_TRACE(wrong.named);
      RowsOf rows(rank, batch, wrong.tokens, wrong.recv_tokens, wrong.columns, wrong.columns);
      RowsOf scales(rank, batch, kF32, wrong.recv_scales, 1, wrong.scale_columns);
      if (rank.rank == guilty_rank(rank)) {
        batch.dispatch_args.tokens = rows.sent.dl();
        batch.dispatch_args.recv_tokens = rows.received.dl();
        batch.dispatch_args.recv_scales = scales.received.dl();
        std::memcpy(&batch.dispatch_args.quantise, &wrong.way, sizeof(wrong.way));
      }
      expect_refused(rank, group.get(), batch, XD_EP_DISPATCH, wrong.named);
      batch.dispatch_args = good;
    }
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, WeightsOfGradientsThatAreOnlyCopiedAreRefused) {
  const Case c = plain_case(world().num_ranks());
  Case roomy = c;
  roomy.cargo = Cargo::e4m3_with_floats;  // scales
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, roomy.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    const xd_ep_combine_bwd_args good = batch.combine_bwd_args;
    RowsOf bytes(rank, batch, kE4m3, kE4m3, 32, 32), scales(rank, batch, kE8m0, kE8m0, 1, 1);
    const auto expect = [&](const char* named, auto change) {
      SCOPED_TRACE(named);
      if (rank.rank == guilty_rank(rank)) change(batch.combine_bwd_args);
      expect_refused(rank, group.get(), batch, XD_EP_COMBINE_BWD, named);
      batch.combine_bwd_args = good;
    };
    expect("weights: given with grad_out of float8_e4m3fn", [&](xd_ep_combine_bwd_args& a) {
      a.grad_out = bytes.sent.dl();
      a.grad_expert_out = bytes.received.dl();
      a.expert_out = a.grad_weights = nullptr;
    });
    expect("weights: given with grad_out_scales", [&](xd_ep_combine_bwd_args& a) {
      a.grad_out_scales = scales.sent.dl();
      a.grad_expert_out_scales = scales.received.dl();
    });
    expect("grad_expert_out_scales", [&](xd_ep_combine_bwd_args& a) {
      a.grad_out_scales = scales.sent.dl();
      a.weights = a.expert_out = a.grad_weights = nullptr;
    });
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, APrepareThatCannotHoldThePlanIsRefused) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    if (rank.rank == guilty_rank(rank)) batch.prepare_args.plan_bytes -= 16;
    expect_refused(rank, group.get(), batch, XD_EP_PREPARE, "plan_bytes");
    batch.prepare_args.plan_bytes += rank.rank == guilty_rank(rank) ? 16 : 0;
    if (rank.rank == guilty_rank(rank)) batch.prepare_args.plan = nullptr;
    expect_refused(rank, group.get(), batch, XD_EP_PREPARE, "plan");
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, MoreTokensOrChoicesThanTheGroupHoldsAreRefused) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    const Batch::Field& field = batch.field(XD_EP_PREPARE, "topk_idx");
    const DLTensor* original = *field.slot;
    Tensor too_many(rank, kI64, {c.max_tokens + 1, c.topk});
    if (rank.rank == guilty_rank(rank)) *field.slot = too_many.dl();
    expect_refused(rank, group.get(), batch, XD_EP_PREPARE, "topk_idx");
    Tensor too_wide(rank, kI64, {1, c.topk + 1});
    if (rank.rank == guilty_rank(rank)) *field.slot = too_wide.dl();
    expect_refused(rank, group.get(), batch, XD_EP_PREPARE, "topk_idx");
    *field.slot = original;
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, AnAlignmentThatIsNoneOfTheGroupsIsRefused) {
  const Case c = plain_case(world().num_ranks());  // it has alignment 4
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    for (const int alignment : {-1, 3, 8, INT32_MIN}) {
      batch.prepare_args.alignment = rank.rank == guilty_rank(rank) ? alignment : 0;
      expect_refused(rank, group.get(), batch, XD_EP_PREPARE,
                     "alignment = " + std::to_string(alignment) +
                         ", expected 0 or a power of two up to the group's 4");
    }
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, WeightsOfARankMajorCombineAreRefused) {
  Case c = plain_case(world().num_ranks());
  c.layout = XD_EP_RANK_MAJOR;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    batch.prepare(group.get());
    Tensor weights(rank, kF32, {1000});
    if (rank.rank == guilty_rank(rank)) batch.combine_args.weights = weights.dl();
    expect_refused(rank, group.get(), batch, XD_EP_COMBINE, "weights");
    expect_group_works(rank, c, group.get());
  });
}

// Rows alone decide: see the grid for what lies beside them.
TEST(BadArguments, PlainReceiveTensorsInAGroupWithoutStagingAreRefused) {
  Case c = plain_case(world().num_ranks());
  c.placing = Placing::unstaged;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    const Place place = rank.rank == guilty_rank(rank) ? Place::ordinary : Place::symmetric;
    Batch batch(rank, c, 0, place);
    batch.prepare(group.get());
    expect_refused(rank, group.get(), batch, XD_EP_DISPATCH, "recv_tokens");
    expect_refused(rank, group.get(), batch, XD_EP_DISPATCH,
                   "expected memory from xd_mem_alloc or registered by xd_mem_register");
    expect_refused(rank, group.get(), batch, XD_EP_COMBINE, "expert_out");
    expect_refused(rank, group.get(), batch, XD_EP_COMBINE_BWD, "expert_out");
    expect_refused(rank, group.get(), batch, XD_EP_DISPATCH_BWD, "grad_recv_tokens");
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, RowsThatAreNot16ByteAlignedAreRefused) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    for (const auto& [operation, name] : {std::pair{XD_EP_DISPATCH, "tokens"},
                                          {XD_EP_DISPATCH, "recv_tokens"},
                                          {XD_EP_COMBINE, "expert_out"},
                                          {XD_EP_COMBINE, "out"},
                                          {XD_EP_COMBINE_BWD, "grad_out"},
                                          {XD_EP_COMBINE_BWD, "grad_expert_out"},
                                          {XD_EP_DISPATCH_BWD, "grad_recv_tokens"},
                                          {XD_EP_DISPATCH_BWD, "grad_tokens"}}) {
      SCOPED_TRACE(name);
      Batch::Field& field = batch.field(operation, name);
      const DLTensor* original = *field.slot;
      DamagedTensor damaged(*original);
      damaged.tensor.data = static_cast<std::byte*>(damaged.tensor.data) + 8;
      if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
      expect_refused(rank, group.get(), batch, operation, "16-byte aligned");
      *field.slot = original;
    }
    expect_group_works(rank, c, group.get());
  });
}

// Any strides will do for scales, but two rows of an output must not share an element.
TEST(BadArguments, ScalesThatOverlapAreRefused) {
  Case c = plain_case(world().num_ranks());
  c.cargo = Cargo::e4m3_with_floats;
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    Batch::Field& field = batch.field(XD_EP_DISPATCH, "recv_scales");
    const DLTensor* original = *field.slot;
    for (const auto& [down, along] : {std::pair{0, 1}, {1, 0}, {1, 1}, {2, -2}, {-3, 3}}) {
      SCOPED_TRACE("strides " + std::to_string(down) + ", " + std::to_string(along));
      DamagedTensor damaged(*original);
      damaged.strides[0] = down;
      damaged.strides[1] = along;
      damaged.tensor.strides = damaged.strides;
      if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
      expect_refused(rank, group.get(), batch, XD_EP_DISPATCH, "recv_scales: has strides");
      *field.slot = original;
    }
    expect_group_works(rank, c, group.get());
  });
}

TEST(BadArguments, ARankThatJoinsWithAFailureIsNamedToItsPeers) {
  const Case c = plain_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c);
    make_plan(group.get(), batch);
    for (const xd_ep_operation operation : kOperations) {
      SCOPED_TRACE("operation " + std::to_string(operation));
      if (rank.rank == guilty_rank(rank)) {
        const char* text = "gate must be float32, got int8";
        const Outcome outcome = finish(
            rank, group.get(), xd_ep_join_failed(group.get(), operation, text, rank.stream()));
        EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
        EXPECT_TRUE(outcome.mentions(text)) << outcome.text;
        EXPECT_EQ(outcome.met.status, XD_ERROR_INVALID_ARGUMENT);
      } else {
        expect_refused(rank, group.get(), batch, operation, "");
      }
      if (operation == XD_EP_PREPARE) make_plan(group.get(), batch);
    }
    expect_group_works(rank, c, group.get());
  });
}

}  // namespace
}  // namespace xd::test
