// Bad arguments of expert parallelism beside those that all families refuse alike.
#include <gtest/gtest.h>

#include <cstddef>
#include <string>

#include "conformance/families/mistakes.h"

namespace xd::test {
namespace {

using S = Scene<Bulk>;

Case plain() { return Bulk::plain(); }

// With scales beside the rows of dispatch.
Case scaled() {
  Case c = plain();
  c.cargo = Cargo::e4m3_with_floats;
  return c;
}

class BulkTensor : public testing::TestWithParam<xd_ep_layout> {};

TEST_P(BulkTensor, WithWrongExtentsIsRefused) {
  Case c = scaled();
  c.layout = GetParam();
  on_every_rank([&](Rank& rank) {
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c);
    for (const Batch::Field& field : scene.batch.fields()) {
      if (field.operation == XD_EP_PREPARE && field.role == Batch::Role::token_input) continue;
      SCOPED_TRACE(std::string(field.name) + " of operation " + std::to_string(field.operation));
      // One token too many, or one receive row too few.
      const bool receive =
          field.role == Batch::Role::receive_input || field.role == Batch::Role::receive_output;
      scene.expect_refused(field.operation, {field.name},
                           [&](S& s) { s.damage(*field.slot).shape[0] += receive ? -1 : 1; });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

INSTANTIATE_TEST_SUITE_P(Layouts, BulkTensor,
                         testing::Values(XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR));

TEST(BulkArguments, BesideTensorsAreRefused) {
  expect_mistakes<Bulk>(plain(), XD_EP_DISPATCH,
                        {{{"struct_size"}, [](S& s) { s.batch.dispatch_args.struct_size = 0; }},
                         {{"plan"}, [](S& s) { s.batch.dispatch_args.plan = nullptr; }},
                         {{"plan"}, [](S& s) { s.batch.dispatch_args.plan_bytes = 0; }},
                         {{"plan"}, [](S& s) { s.batch.dispatch_args.plan_bytes = 64; }},
                         {{"plan"}, [](S& s) {
                            const void*& plan = s.batch.dispatch_args.plan;
                            plan = static_cast<const std::byte*>(plan) + 4;
                          }}});
}

// A dispatch that shall quantise rows of so many columns.
struct Quantised {
  const char* named;
  int way;
  DLDataType tokens, recv_tokens, recv_scales;
  std::int64_t columns, scale_columns;
};

constexpr Quantised kBadlyQuantised[] = {
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

TEST(BulkArguments, AWayToQuantiseThatDoesNotFitTheTensorsIsRefused) {
  Case c = plain();
  c.row_units = 32;
  on_every_rank([&](Rank& rank) {
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c);
    for (const Quantised& wrong : kBadlyQuantised) {
      SCOPED_TRACE(wrong.named);
      scene.expect_refused(XD_EP_DISPATCH, {wrong.named}, [&](S& s) {
        xd_ep_dispatch_args& args = s.batch.dispatch_args;
        const std::int64_t tokens = args.tokens->shape[0], rows = args.recv_tokens->shape[0];
        args.tokens = s.tensor(wrong.tokens, {tokens, wrong.columns});
        args.recv_tokens = s.tensor(wrong.recv_tokens, {rows, wrong.columns});
        args.recv_scales = s.tensor(wrong.recv_scales, {rows, wrong.scale_columns});
        force(args.quantise, wrong.way);
      });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

TEST(BulkArguments, ScalesOfFourBitRowsAreOneFor16Or32Numbers) {
  on_every_rank([](Rank& rank) {
    const Case c = plain();
    const Group group = Bulk::make_roomy(rank);
    S scene(rank, group.get(), c);
    for (const std::int64_t columns : {1, 3, 5}) {
      const std::string named = "scales: has " + std::to_string(columns) +
                                " columns beside tokens of 32 bytes of two numbers";
      scene.expect_refused(XD_EP_DISPATCH, {named.c_str()}, [&](S& s) {
        xd_ep_dispatch_args& args = s.batch.dispatch_args;
        const std::int64_t tokens = args.tokens->shape[0], rows = args.recv_tokens->shape[0];
        args.tokens = s.tensor(kE2m1x2, {tokens, 32});
        args.recv_tokens = s.tensor(kE2m1x2, {rows, 32});
        args.scales = s.tensor(kE8m0, {tokens, columns});
        args.recv_scales = s.tensor(kE8m0, {rows, columns});
      });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

// Rows of 32 bytes, or rows as they are, with a scale each.
void give_bytes(S& s) {
  xd_ep_combine_bwd_args& a = s.batch.combine_bwd_args;
  a.grad_out = s.tensor(kE4m3, {a.grad_out->shape[0], 32});
  a.grad_expert_out = s.tensor(kE4m3, {a.grad_expert_out->shape[0], 32});
}
void give_scales(S& s) {
  xd_ep_combine_bwd_args& a = s.batch.combine_bwd_args;
  a.grad_out_scales = s.tensor(kE8m0, {a.grad_out->shape[0], 1});
  a.grad_expert_out_scales = s.tensor(kE8m0, {a.grad_expert_out->shape[0], 1});
}

TEST(BulkArguments, WeightsOfGradientsThatAreOnlyCopiedAreRefused) {
  on_every_rank([](Rank& rank) {
    const Case c = plain();
    const Group group = Bulk::make_roomy(rank);
    S scene(rank, group.get(), c);
    const auto expect = [&](const char* named, auto make) {
      scene.expect_refused(XD_EP_COMBINE_BWD, {named}, make);
    };
    expect("weights: given with grad_out of float8_e4m3fn", [](S& s) {
      give_bytes(s);
      s.batch.combine_bwd_args.expert_out = s.batch.combine_bwd_args.grad_weights = nullptr;
    });
    expect("weights: given with grad_out_scales", give_scales);
    expect("grad_expert_out_scales", [](S& s) {
      give_scales(s);
      xd_ep_combine_bwd_args& a = s.batch.combine_bwd_args;
      a.grad_expert_out_scales = a.weights = a.expert_out = a.grad_weights = nullptr;
    });
    Bulk::expect_works(rank, c, group.get());
  });
}

TEST(BulkArguments, APrepareThatCannotHoldThePlanIsRefused) {
  expect_mistakes<Bulk>(plain(), XD_EP_PREPARE,
                        {{{"plan_bytes"}, [](S& s) { s.batch.prepare_args.plan_bytes -= 16; }},
                         {{"plan"}, [](S& s) { s.batch.prepare_args.plan = nullptr; }}});
}

TEST(BulkArguments, MoreTokensOrChoicesThanTheGroupHoldsAreRefused) {
  expect_mistakes<Bulk>(
      plain(), XD_EP_PREPARE,
      {{{"topk_idx"},
        [](S& s) {
          s.batch.prepare_args.topk_idx = s.tensor(kI64, {s.c.max_tokens + 1, s.c.topk});
        }},
       {{"topk_idx"}, [](S& s) {
          s.batch.prepare_args.topk_idx = s.tensor(kI64, {1, s.c.topk + 1});
        }}});
}

TEST(BulkArguments, AnAlignmentThatIsNoneOfTheGroupsIsRefused) {
  on_every_rank([](Rank& rank) {
    const Case c = plain();  // it has alignment 4
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c);
    for (const int alignment : {-1, 3, 8, INT32_MIN}) {
      scene.expect_refused(XD_EP_PREPARE,
                           {"alignment = " + std::to_string(alignment) +
                            ", expected 0 or a power of two up to the group's 4"},
                           [&](S& s) { s.batch.prepare_args.alignment = alignment; });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

TEST(BulkArguments, WeightsOfARankMajorCombineAreRefused) {
  Case c = plain();
  c.layout = XD_EP_RANK_MAJOR;
  expect_mistakes<Bulk>(
      c, XD_EP_COMBINE,
      {{{"weights"}, [](S& s) { s.batch.combine_args.weights = s.tensor(kF32, {1000}); }}});
}

// Rows alone decide: see the grid for what lies beside them.
TEST(BulkArguments, PlainReceiveTensorsInAGroupWithoutStagingAreRefused) {
  Case c = plain();
  c.placing = Placing::unstaged;
  on_every_rank([&](Rank& rank) {
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c, is_guilty(rank) ? Place::ordinary : Place::symmetric);
    const auto as_it_is = [](S&) {};
    scene.expect_refused(
        XD_EP_DISPATCH,
        {"recv_tokens", "expected memory from xd_mem_alloc or registered by xd_mem_register"},
        as_it_is);
    if (rank.asynchronous()) {  // a GPU's own rank alone reads what combine sums
      scene.expect_refused(XD_EP_COMBINE_BWD, {"grad_expert_out"}, as_it_is);
    } else {
      scene.expect_refused(XD_EP_COMBINE, {"expert_out"}, as_it_is);
      scene.expect_refused(XD_EP_COMBINE_BWD, {"expert_out"}, as_it_is);
      scene.expect_refused(XD_EP_DISPATCH_BWD, {"grad_recv_tokens"}, as_it_is);
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

TEST(BulkArguments, RowsThatAreNot16ByteAlignedAreRefused) {
  on_every_rank([](Rank& rank) {
    const Case c = plain();
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c);
    for (const auto& [operation, name] : {std::pair{XD_EP_DISPATCH, "tokens"},
                                          {XD_EP_DISPATCH, "recv_tokens"},
                                          {XD_EP_COMBINE, "expert_out"},
                                          {XD_EP_COMBINE, "out"},
                                          {XD_EP_COMBINE_BWD, "grad_out"},
                                          {XD_EP_COMBINE_BWD, "grad_expert_out"},
                                          {XD_EP_DISPATCH_BWD, "grad_recv_tokens"},
                                          {XD_EP_DISPATCH_BWD, "grad_tokens"}}) {
      SCOPED_TRACE(name);
      const Batch::Field& field = scene.batch.field(operation, name);
      scene.expect_refused(operation, {"16-byte aligned"}, [&](S& s) {
        DLTensor& moved = s.damage(*field.slot).tensor;
        moved.data = static_cast<std::byte*>(moved.data) + 8;
      });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

// Any strides will do for scales, but two rows of an output must not share an element.
TEST(BulkArguments, ScalesThatOverlapAreRefused) {
  on_every_rank([](Rank& rank) {
    const Case c = scaled();
    const Group group = Bulk::make(rank, c);
    S scene(rank, group.get(), c);
    for (const auto& strides : {std::pair{0, 1}, {1, 0}, {1, 1}, {2, -2}, {-3, 3}}) {
      SCOPED_TRACE(testing::PrintToString(strides));
      scene.expect_refused(XD_EP_DISPATCH, {"recv_scales: has strides"}, [&](S& s) {
        s.damage(s.batch.dispatch_args.recv_scales).give_strides({strides.first, strides.second});
      });
    }
    Bulk::expect_works(rank, c, group.get());
  });
}

}  // namespace
}  // namespace xd::test
