// A bad argument of a low-latency call on one rank: INVALID_ARGUMENT there, naming it; MISMATCH
// naming that rank on all others; nothing written; and the group goes on. And configs that are bad.
#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "conformance/damaged_tensor.h"
#include "conformance/ll_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

constexpr xd_ep_operation kKinds[] = {XD_EP_LL_DISPATCH, XD_EP_LL_COMBINE};

int guilty_rank(const Rank& rank) { return rank.num_ranks - 1; }

// `named`: what the guilty rank's text must mention.
void expect_refused(const Rank& rank, xd_ep_group* group, LlBatch& batch, xd_ep_operation operation,
                    const std::string& named) {
  const Outcome outcome = batch.call(group, operation);
  if (rank.rank == guilty_rank(rank)) {
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions(named)) << "expected '" << named << "' in: " << outcome.text;
  } else {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("rank " + std::to_string(guilty_rank(rank)))) << outcome.text;
  }
  EXPECT_EQ(outcome.met.status, outcome.status) << outcome.met.text;
  EXPECT_EQ(batch.written(operation), "");
  batch.reset_tensors(operation);  // times
}

// A dispatch that was refused may have left no plan.
void make_plan(xd_ep_group* group, LlBatch& batch) {
  batch.dispatch(group);
  batch.reset_tensors(XD_EP_LL_DISPATCH);
}

const std::vector<Damage>& all_damages() {
  static const std::vector<Damage> all = damages({
      {"TooManyExtents", add_extent},
      {"TooLong", [](DamagedTensor& d) { d.shape[0] += 100; }},
      {"EqualStrides", spread_out},
  });
  return all;
}

// Runs `body` with every tensor argument of a batch, with a plan where that is needed.
void for_each_field(
    const LlCase& c,
    const std::function<void(const Rank&, xd_ep_group*, LlBatch&, LlBatch::Field&)>& body) {
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    for (LlBatch::Field& field : batch.fields()) {
      SCOPED_TRACE(std::string(field.name) + " of operation " + std::to_string(field.operation));
      if (field.operation == XD_EP_LL_COMBINE) make_plan(group.get(), batch);
      body(rank, group.get(), batch, field);
    }
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

// Has all tensors that there are.
LlCase full_case() {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 64;
  c.max_tokens = 5;
  c.sent = Sent::float_scales;
  c.weights = Weights::both;
  return c;
}

TEST(LlBadTensor, IsRefusedByNameAndNamesTheRankToPeers) {
  for_each_field(full_case(),
                 [&](const Rank& rank, xd_ep_group* group, LlBatch& batch, LlBatch::Field& field) {
                   const auto at = static_cast<std::size_t>(&field - batch.fields().data());
                   for (std::size_t number = 0; number < all_damages().size(); ++number) {
                     // On two ranks every field has every damage, on others one of them.
                     if (rank.num_ranks != 2 && number != at % all_damages().size()) continue;
                     const Damage& damage = all_damages()[number];
                     SCOPED_TRACE(damage.name);
                     const DLTensor* const original = *field.slot;
                     DamagedTensor damaged(*original);
                     damage.apply(damaged);
                     if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
                     expect_refused(rank, group, batch, field.operation, field.name);
                     *field.slot = original;
                   }
                 });
}

TEST(LlBadTensor, ThatIsMissingIsRefused) {
  for_each_field(
      full_case(), [](const Rank& rank, xd_ep_group* group, LlBatch& batch, LlBatch::Field& field) {
        const std::string name = field.name;
        for (const char* optional :
             {"topk_weights", "source_ranges", "source_tokens", "expert_load", "wait_ns"}) {
          if (name == optional) return;
        }
        const DLTensor* const original = *field.slot;
        if (rank.rank == guilty_rank(rank)) *field.slot = nullptr;
        expect_refused(rank, group, batch, field.operation, name);
        *field.slot = original;
      });
}

// Of tensors [L,S,H] and [L,S,C]: rows in parts, rows that share a place, rows between multiples of
// 16 bytes.
TEST(LlBadTensor, WithStridesThatGiveNoRowAPlaceOfItsOwnIsRefused) {
  const LlCase c = full_case();
  for_each_field(c,
                 [&](const Rank& rank, xd_ep_group* group, LlBatch& batch, LlBatch::Field& field) {
                   const std::string name = field.name;
                   if (name != "recv_tokens" && name != "recv_scales" && name != "expert_out")
                     return;
                   const DLTensor* const original = *field.slot;
                   const std::int64_t s = original->shape[1], h = original->shape[2];
                   std::vector<std::vector<std::int64_t>> wrong;
                   if (field.output) wrong = {{0, h, 1}, {s * h, 0, 1}, {h, h, 1}};
                   if (name != "recv_scales") {
                     wrong.push_back({2 * s * h, 2 * h, 2});
                     wrong.push_back({s * (h + 1), h + 1, 1});
                   }
                   if (name == "recv_tokens") wrong.push_back({s * h, h - 16, 1});
                   for (const std::vector<std::int64_t>& strides : wrong) {
                     SCOPED_TRACE(testing::PrintToString(strides));
                     DamagedTensor damaged(*original);
                     for (std::size_t d = 0; d < 3; ++d) damaged.strides[d] = strides[d];
                     damaged.tensor.strides = damaged.strides;
                     if (rank.rank == guilty_rank(rank)) *field.slot = &damaged.tensor;
                     expect_refused(rank, group, batch, field.operation, name);
                     *field.slot = original;
                   }
                 });
}

// A mistake beside the tensors.
struct Mistake {
  xd_ep_operation operation;
  const char* named;
  std::function<void(LlBatch&)> make;
};

template <class Enum>
void force(Enum& field, int value) {
  std::memcpy(&field, &value, sizeof(value));
}

const Mistake kMistakes[] = {
    {XD_EP_LL_DISPATCH, "struct_size", [](LlBatch& b) { b.dispatch_args.struct_size = 0; }},
    {XD_EP_LL_DISPATCH, "plan", [](LlBatch& b) { b.dispatch_args.plan = nullptr; }},
    {XD_EP_LL_DISPATCH, "plan_bytes", [](LlBatch& b) { b.dispatch_args.plan_bytes -= 16; }},
    {XD_EP_LL_DISPATCH, "plan",
     [](LlBatch& b) { b.dispatch_args.plan = static_cast<std::byte*>(b.dispatch_args.plan) + 4; }},
    {XD_EP_LL_DISPATCH, "quantise", [](LlBatch& b) { force(b.dispatch_args.quantise, 4); }},
    {XD_EP_LL_DISPATCH, "quantise", [](LlBatch& b) { force(b.dispatch_args.quantise, 5); }},
    {XD_EP_LL_DISPATCH, "quantise", [](LlBatch& b) { force(b.dispatch_args.quantise, -1); }},
    {XD_EP_LL_DISPATCH, "recv_tokens", [](LlBatch& b) { force(b.dispatch_args.quantise, 0); }},
    {XD_EP_LL_COMBINE, "struct_size", [](LlBatch& b) { b.combine_args.struct_size = 0; }},
    {XD_EP_LL_COMBINE, "plan", [](LlBatch& b) { b.combine_args.plan = nullptr; }},
    {XD_EP_LL_COMBINE, "plan", [](LlBatch& b) { b.combine_args.plan_bytes = 0; }},
    {XD_EP_LL_COMBINE, "plan", [](LlBatch& b) { b.combine_args.plan_bytes = 64; }},
    {XD_EP_LL_COMBINE, "plan",
     [](LlBatch& b) {
       b.combine_args.plan = static_cast<const std::byte*>(b.combine_args.plan) + 4;
     }},
};

TEST(LlBadArguments, BesideTensorsAreRefused) {
  const LlCase c = full_case();
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    const xd_ep_ll_dispatch_args dispatch = batch.dispatch_args;
    const xd_ep_ll_combine_args combine = batch.combine_args;
    for (const Mistake& mistake : kMistakes) {
      SCOPED_TRACE("mistake " + std::to_string(&mistake - kMistakes));
      if (mistake.operation == XD_EP_LL_COMBINE) make_plan(group.get(), batch);
      if (rank.rank == guilty_rank(rank)) mistake.make(batch);
      expect_refused(rank, group.get(), batch, mistake.operation, mistake.named);
      batch.dispatch_args = dispatch;
      batch.combine_args = combine;
    }
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

// Which half is meant is not known, so it is the whole operation, of which the peers hear.
TEST(LlBadArguments, APhaseThatIsNoneFailsAsAWholeCallAndNamesTheRankToPeers) {
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    const int bad = rank.num_ranks - 1;
    for (const int phase : {-1, 3}) {
      for (const xd_ep_operation kind : kKinds) {
        make_plan(group.get(), batch);
        batch.reset_tensors(kind);
        xd_ep_ll_dispatch_args dispatch = batch.dispatch_args;
        xd_ep_ll_combine_args combine = batch.combine_args;
        if (rank.rank == bad) {  // in the struct: C++ code may not pass this on as an enum
          force(dispatch.phase, phase);
          force(combine.phase, phase);
        }
        const Outcome outcome = finish(
            rank, group.get(),
            kind == XD_EP_LL_DISPATCH ? xd_ep_ll_dispatch(group.get(), &dispatch, rank.stream())
                                      : xd_ep_ll_combine(group.get(), &combine, rank.stream()));
        EXPECT_EQ(outcome, rank.rank == bad ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH);
        EXPECT_EQ(outcome.met.rank, bad) << outcome.text;
        EXPECT_TRUE(rank.rank != bad || outcome.mentions("phase")) << outcome.text;
        EXPECT_EQ(batch.written(kind), "");
      }
    }
    batch.reset_tensors(XD_EP_LL_DISPATCH);
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

// Sizes of a batch beyond those of the group.
TEST(LlBadArguments, BatchesThatTheGroupCannotHoldAreRefused) {
  const LlCase c = plain_ll_case(world().num_ranks());
  struct Larger {
    const char* named;
    void (*grow)(LlCase&);
  };
  const Larger kinds[] = {
      {"", [](LlCase& l) { l.max_tokens += 1; }},
      {"topk_idx", [](LlCase& l) { l.topk += 1; }},
      {"tokens", [](LlCase& l) { l.row_units += 1; }},
  };
  on_every_rank([&](Rank& rank) {
    const Group group = make_group(rank, c);
    for (const Larger& kind : kinds) {
      LlCase larger = c;
      kind.grow(larger);
      LlBatch batch(rank, rank.rank == guilty_rank(rank) ? larger : c, 0);
      expect_refused(rank, group.get(), batch, XD_EP_LL_DISPATCH, kind.named);
    }
    LlBatch batch(rank, c, 0);
    batch.dispatch(group.get());
    batch.combine(group.get());
  });
}

// ---- Configs ------------------------------------------------------------------------------------

struct BadConfig {
  const char* named;
  std::function<void(xd_ep_config&)> change;
};

const BadConfig kBadConfigs[] = {
    {"recv_capacity", [](xd_ep_config& c) { c.recv_capacity = 1000; }},
    {"alignment", [](xd_ep_config& c) { c.alignment = 4; }},
    {"max_scale_bytes", [](xd_ep_config& c) { c.max_scale_bytes = 4; }},
    {"zero_tail", [](xd_ep_config& c) { c.zero_tail = 1; }},
    {"overflow", [](xd_ep_config& c) { c.overflow = XD_EP_OVERFLOW_DROP; }},
    {"staging", [](xd_ep_config& c) { c.staging = XD_EP_STAGING_NONE; }},
    {"max_tokens_per_rank",
     [](xd_ep_config& c) { c.max_tokens_per_rank = XD_EP_LL_MAX_TOKENS + 1; }},
    {"in_flight", [](xd_ep_config& c) { c.in_flight = 1; }},
    {"in_flight", [](xd_ep_config& c) { c.in_flight = 5; }},
    {"in_flight", [](xd_ep_config& c) { c.in_flight = -1; }},
    {"wait_timeout_ms", [](xd_ep_config& c) { c.wait_timeout_ms = -1; }},
    {"net_buffer_bytes", [](xd_ep_config& c) { c.net_buffer_bytes = 1; }},
    {"on_peer_loss", [](xd_ep_config& c) { force(c.on_peer_loss, 2); }},
    {"layout", [](xd_ep_config& c) { force(c.layout, 3); }},
    {"dtype", [](xd_ep_config& c) { c.dtype = kE4m3; }},
    {"dtype", [](xd_ep_config& c) { c.dtype = kU8; }},
    {"hidden", [](xd_ep_config& c) { c.hidden = 12; }},
    {"max_topk", [](xd_ep_config& c) { c.max_topk = XD_EP_MAX_TOPK + 1; }},
};

TEST(LlConfig, ThatIsBadIsRefusedByTheFieldsName) {
  const LlCase c = plain_ll_case(2);
  const std::vector<std::int32_t> owners = c.owners();
  for (const BadConfig& bad : kBadConfigs) {
    SCOPED_TRACE(std::string(bad.named) + ", bad config " + std::to_string(&bad - kBadConfigs));
    xd_ep_config config = c.config(owners);
    bad.change(config);
    std::size_t bytes = 0;
    std::int64_t rows = 0;
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    for (const xd_status status :
         {xd_ep_plan_size(&config, &bytes), xd_ep_recv_bound(&config, &rows),
          xd_ep_group_memory(&config, &memory)}) {
      EXPECT_EQ(status, XD_ERROR_INVALID_ARGUMENT);
      EXPECT_NE(std::string(xd_last_error()).find(bad.named), std::string::npos) << xd_last_error();
    }
  }
}

TEST(LlConfig, OfMoreRanksThanTheLayoutHasIsRefused) {
  LlCase c = plain_ll_case(XD_EP_LL_MAX_RANKS);
  std::vector<std::int32_t> owners = c.owners();
  xd_ep_config config = c.config(owners);
  std::int64_t rows = 0;
  EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_SUCCESS) << xd_last_error();
  c.num_ranks = XD_EP_LL_MAX_RANKS + 1;
  owners = c.owners();
  config = c.config(owners);
  EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_NE(std::string(xd_last_error()).find("num_ranks"), std::string::npos) << xd_last_error();
}

// Fields of this layout say nothing in the others.
TEST(LlConfig, FieldsAreRefusedInOtherLayouts) {
  const BadConfig fields[] = {
      {"in_flight", [](xd_ep_config& c) { c.in_flight = 2; }},
      {"on_peer_loss", [](xd_ep_config& c) { c.on_peer_loss = XD_EP_PEER_LOSS_MASK; }},
      {"wait_timeout_ms", [](xd_ep_config& c) { c.wait_timeout_ms = 100; }},
  };
  const LlCase c = plain_ll_case(2);
  const std::vector<std::int32_t> owners = c.owners();
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    for (const BadConfig& field : fields) {
      xd_ep_config config = c.config(owners);
      config.layout = layout;
      std::int64_t rows = 0;
      EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_SUCCESS) << xd_last_error();
      field.change(config);
      EXPECT_EQ(xd_ep_recv_bound(&config, &rows), XD_ERROR_INVALID_ARGUMENT);
      EXPECT_NE(std::string(xd_last_error()).find(field.named), std::string::npos)
          << xd_last_error();
    }
  }
}

TEST(LlConfig, HasAsManySlotsAsTokensOfAllRanks) {
  for (const int ranks : {1, 3, 72}) {
    LlCase c = plain_ll_case(ranks);
    for (const int tokens : {1, 12, 128, XD_EP_LL_MAX_TOKENS}) {
      c.max_tokens = tokens;
      const std::vector<std::int32_t> owners = c.owners();
      const xd_ep_config config = c.config(owners);
      std::int64_t rows = 0;
      ok(xd_ep_recv_bound(&config, &rows));
      EXPECT_EQ(rows, c.num_slots());
    }
  }
}

// As the header says: about W*T*(8*K + 16) bytes, and memory that grows with what is in flight.
TEST(LlConfig, SaysHowMuchMemoryItTakes) {
  LlCase c = plain_ll_case(4);
  c.local_experts = 64;
  c.topk = 8;
  c.max_tokens = 128;
  c.row_units = 896;
  const std::vector<std::int32_t> owners = c.owners();
  xd_ep_config config = c.config(owners);
  std::size_t plan_bytes = 0;
  ok(xd_ep_plan_size(&config, &plan_bytes));
  EXPECT_LE(plan_bytes, 4u * 128 * (8 * 8 + 16) * 5 / 4 + 8192);
  std::size_t last = 0;
  for (const int in_flight : {2, 3, 4}) {
    config.in_flight = in_flight;
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    ok(xd_ep_group_memory(&config, &memory));
    EXPECT_GT(memory.symmetric_bytes, last);
    EXPECT_GE(memory.symmetric_bytes, memory.staging_bytes);
    last = memory.symmetric_bytes;
    EXPECT_LE(memory.symmetric_bytes + memory.private_bytes,
              static_cast<std::size_t>(in_flight) * 20'000'000u);
  }
}

// What must be equal on all ranks is named where it is not.
TEST(LlConfig, ThatDiffersBetweenRanksIsNamed) {
  if (world().num_ranks() == 1) GTEST_SKIP() << "one rank always agrees with itself";
  const BadConfig fields[] = {
      {"in_flight", [](xd_ep_config& c) { c.in_flight = 3; }},
      {"on_peer_loss", [](xd_ep_config& c) { c.on_peer_loss = XD_EP_PEER_LOSS_MASK; }},
      {"wait_timeout_ms", [](xd_ep_config& c) { c.wait_timeout_ms = 100; }},
      {"max_tokens_per_rank", [](xd_ep_config& c) { c.max_tokens_per_rank += 1; }},
      {"layout",
       [](xd_ep_config& c) {
         c.layout = XD_EP_EXPERT_MAJOR;
         c.in_flight = 0;
       }},
  };
  const LlCase c = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    const std::vector<std::int32_t> owners = c.owners();
    for (const BadConfig& field : fields) {
      SCOPED_TRACE(field.named);
      xd_ep_config config = c.config(owners);
      if (rank.rank == 0) field.change(config);
      xd_ep_group* group = nullptr;
      EXPECT_EQ(xd_ep_group_create(rank.comm, &config, &group), XD_ERROR_MISMATCH)
          << xd_last_error();
      EXPECT_NE(std::string(xd_last_error()).find(field.named), std::string::npos)
          << xd_last_error();
      EXPECT_EQ(group, nullptr);
    }
    const Group good = make_group(rank, c);
    LlBatch batch(rank, c, 0);
    batch.dispatch(good.get());
    batch.combine(good.get());
  });
}

}  // namespace
}  // namespace xd::test
