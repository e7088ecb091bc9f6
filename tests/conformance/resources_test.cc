// Resources that the library takes from the process: none per call, the announced amount per group
// or context, and all of them given back in the end.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "conformance/counted_new.h"
#include "conformance/expect_usage.h"
#include "conformance/families/family.h"
#include "conformance/quantised.h"

namespace xd::test {
namespace {

// The rows that dispatch carries.
struct Carried {
  std::string name;
  xd_ep_layout layout;
  Cargo cargo;
  xd_ep_quantise way = XD_EP_QUANTISE_NONE;
};

std::vector<Carried> everything_carried() {
  std::vector<Carried> all;
  for (const xd_ep_layout layout : {XD_EP_EXPERT_MAJOR, XD_EP_RANK_MAJOR}) {
    const std::string where = layout == XD_EP_EXPERT_MAJOR ? "expert-major" : "rank-major";
    all.push_back({where, layout, Cargo::payload});
    all.push_back({where + " with scales", layout, Cargo::e4m3_with_floats});
    for (const xd_ep_quantise way : kWaysToQuantise) {
      all.push_back(
          {where + " quantised, way " + std::to_string(way), layout, Cargo::payload, way});
    }
  }
  return all;
}

// A batch whose dispatch carries these rows. Where they have scales, combine_bwd carries them too.
class CarryingBatch {
 public:
  CarryingBatch(const Rank& rank, const Case& c, const Carried& carried, Place place)
      : batch_(rank, c, 0, place) {
    if (carried.way != XD_EP_QUANTISE_NONE) quantise(rank, carried.way, place);
    if (carried.cargo == Cargo::e4m3_with_floats) carry_scales_back();
  }
  Batch& batch() { return batch_; }

 private:
  void quantise(const Rank& rank, xd_ep_quantise way, Place place) {
    const std::vector<std::int64_t> shape =
        batch_.field(XD_EP_DISPATCH, "recv_tokens").tensor->shape();
    const QuantisedWay format = quantised_way(way);
    recv_tokens_.emplace(rank, kE4m3, shape, place);
    recv_scales_.emplace(rank, format.scale_type, std::vector{shape[0], shape[1] / format.block},
                         place);
    batch_.dispatch_args.recv_tokens = recv_tokens_->dl();
    batch_.dispatch_args.recv_scales = recv_scales_->dl();
    batch_.dispatch_args.quantise = way;
  }

  void carry_scales_back() {
    const xd_ep_dispatch_args& there = batch_.dispatch_args;
    xd_ep_combine_bwd_args& args = batch_.combine_bwd_args;
    args.grad_out = there.tokens;
    args.grad_out_scales = there.scales;
    args.grad_expert_out = there.recv_tokens;
    args.grad_expert_out_scales = there.recv_scales;
    args.expert_out = args.weights = args.grad_weights = nullptr;
  }

  Batch batch_;
  std::optional<Tensor> recv_tokens_, recv_scales_;
};

void expect_no_allocations(Rank& rank, const Carried& carried) {
  Case c = plain_case(rank.num_ranks);
  c.layout = carried.layout;
  c.cargo = carried.cargo;
  c.row_units = 16;  // a row is a block to quantise
  const Group group = make_group(rank.comm, c.config(rank.rank));
  for (const Place place : {Place::ordinary, Place::symmetric}) {
    CarryingBatch carrying(rank, c, carried, place);
    for (int round = 0; round < 3; ++round) {
      for (const xd_ep_operation operation :
           {XD_EP_PREPARE, XD_EP_DISPATCH, XD_EP_COMBINE, XD_EP_COMBINE_BWD, XD_EP_DISPATCH_BWD}) {
        const std::size_t before = allocations_of_this_thread();
        const xd_status status = carrying.batch().enqueue(group.get(), operation);
        EXPECT_EQ(allocations_of_this_thread(), before)
            << carried.name << ": operation " << operation << " in round " << round;
        ok(finish(rank, group.get(), status));
      }
    }
  }
}

TEST(Allocations, OfStepsAreNone) {
  const std::vector<Carried> all = everything_carried();
  on_every_rank([&](Rank& rank) {
    for (const Carried& carried : all) expect_no_allocations(rank, carried);
  });
}

// Also in halves, and with the errors that take a turn.
TEST(Allocations, OfLowLatencyStepsAreNone) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 16;
  on_every_rank([&](Rank& rank) {
    for (const Sent sent : {Sent::as_they_are, Sent::e8m0}) {
      LlCase own = c;
      own.sent = sent;
      const LlGroup group = make_group(rank, own);
      LlBatch batch(rank, own, 0);
      for (int round = 0; round < 4; ++round) {
        for (const xd_ll_operation operation : {XD_LL_DISPATCH, XD_LL_COMBINE}) {
          for (const xd_ll_phase phase :
               {XD_LL_PHASE_BOTH, XD_LL_PHASE_SEND, XD_LL_PHASE_RECEIVE}) {
            const std::size_t before = allocations_of_this_thread();
            const xd_status status = batch.enqueue(group.get(), operation, phase);
            EXPECT_EQ(allocations_of_this_thread(), before)
                << "operation " << operation << ", phase " << phase << " in round " << round;
            ok(finish(rank, group.get(), status));
          }
        }
      }
    }
  });
}

// Everything that a call can have.
GemmCase rich_case(xd_gemm_operation operation) {
  GemmCase c = plain_gemm_case(world().num_ranks(), operation);
  c.addend = Addend::in_place;
  c.bias = Bias::f32;
  c.epilogue = XD_GEMM_EPILOGUE_GELU;
  c.pre_activation = true;
  c.bias_grad = operation == XD_GEMM_ALL_REDUCE ? BiasGrad::own : BiasGrad::reduced;
  c.amax = true;
  c.gathered = Gathered::both;
  c.alpha = 1.0f / 64;
  return c;
}

TEST(Allocations, OfProductsAreNone) {
  for_each_product([](Rank& rank, xd_gemm_operation operation) {
    for (const Spots spots : {Spots::ordinary, Spots::symmetric}) {
      GemmCase c = rich_case(operation);
      c.spots = spots;
      const GemmContext context = make_context(rank.comm, c.config());
      for (int step = 0; step < 3; ++step) {
        GemmBatch batch(rank, c, step);
        for (const xd_gemm_algo algo : kGemmAlgos) {
          batch.args.algo = algo;
          if (!batch.can_call(context.get())) continue;
          batch.reset();
          const std::size_t before = allocations_of_this_thread();
          const xd_status status = batch.enqueue(context.get());
          EXPECT_EQ(allocations_of_this_thread(), before)
              << name_of(operation) << " by algorithm " << algo << ", call " << step;
          ok(finish(rank, context.get(), status));
        }
      }
    }
  });
}

// The lowest rank of each device, which asks for all ranks on it.
TEST(GroupMemory, IsWhatWasSaidOfItsDevice) {
  if (world().memory().device().device_type == kDLCPU) GTEST_SKIP() << "the CPU is no such device";
  Case c = plain_case(world().num_ranks());
  c.max_tokens = 8192;  // so much that what is rounded up to pages and pools is little
  c.row_units = 896;
  on_every_rank([&](Rank& rank) {
    xd_ep_config config = c.config(rank.rank);
    config.device_type = kDLCUDA;
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    ok(xd_ep_group_memory(&config, &memory));
    ok(xd_comm_barrier(rank.comm));
    const std::size_t before = rank.memory->device_bytes_used();
    ok(xd_comm_barrier(rank.comm));
    const Group group = make_group(rank.comm, config);
    ok(xd_comm_barrier(rank.comm));
    const int devices = device_count("cuda");
    if (rank.rank < devices) {
      const int ranks_here = (rank.num_ranks - rank.rank + devices - 1) / devices;
      const double said =
          ranks_here * static_cast<double>(memory.symmetric_bytes + memory.private_bytes);
      EXPECT_NEAR(static_cast<double>(rank.memory->device_bytes_used() - before), said, said / 20);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(GroupMemory, WithoutStagingIsLessByWhatWasSaid) {
  xd_ep_config config = plain_case(world().num_ranks()).config(0);
  xd_ep_memory staged = XD_EP_MEMORY_INIT;
  ok(xd_ep_group_memory(&config, &staged));
  config.staging = XD_EP_STAGING_NONE;
  xd_ep_memory unstaged = XD_EP_MEMORY_INIT;
  ok(xd_ep_group_memory(&config, &unstaged));
  EXPECT_GT(staged.symmetric_bytes, staged.staging_bytes);
  EXPECT_EQ(staged.symmetric_bytes - staged.staging_bytes, unstaged.symmetric_bytes);
  EXPECT_EQ(unstaged.staging_bytes, 0u);
}

// ---- Of every family ----------------------------------------------------------------------------

template <class F>
class Resources : public testing::Test {};
TYPED_TEST_SUITE(Resources, Families, FamilyName);

// Configs that take memory of several kinds.
template <class F>
std::vector<typename F::Config> configs();

template <>
std::vector<xd_ep_config> configs<Bulk>() {
  Case c = Bulk::plain();
  c.max_tokens = 500;
  return {c.config(0)};
}

template <>
std::vector<xd_ll_config> configs<LowLatency>() {
  std::vector<xd_ll_config> all;
  for (const int in_flight : {2, 4}) {
    LlCase c = LowLatency::plain();
    c.max_tokens = 500;
    c.in_flight = in_flight;
    all.push_back(c.config(c.owners()));  // experts lie in order, without a list
  }
  return all;
}

template <>
std::vector<xd_gemm_config> configs<Products>() {
  std::vector<xd_gemm_config> all;
  for (const int operations : {0, 1, 2, 4, 31}) {
    xd_gemm_config& config = all.emplace_back(rich_case(XD_GEMM_ALL_GATHER).config());
    config.operations = operations;
    config.max_tokens = 300;
  }
  return all;
}

TYPED_TEST(Resources, AHandleTakesWhatItSaid) {
  using F = TypeParam;
  if (world().memory().device().device_type != kDLCPU) GTEST_SKIP() << "of the host's memory";
  for (const auto& config : configs<F>()) {
    on_every_rank([&](Rank& rank) {
      HostMemoryTaken taken(rank);
      ok(xd_comm_barrier(rank.comm));
      taken.begin();
      ok(xd_comm_barrier(rank.comm));
      const auto memory = F::memory(config);
      typename F::Raw* made = nullptr;
      ok(F::create(rank.comm, &config, &made));
      const typename F::Handle handle(made);
      ok(xd_comm_barrier(rank.comm));
      taken.expect(memory.symmetric_bytes, memory.private_bytes);
      ok(xd_comm_barrier(rank.comm));
    });
  }
}

template <class F>
void create_and_destroy(int rounds) {
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < rounds; ++round) {
      const Comm comm = rank.another_comm("round" + std::to_string(round), 65536);
      Rank there = rank;
      there.comm = comm.get();
      const auto operation =
          F::kOperations[static_cast<std::size_t>(round) % std::size(F::kOperations)];
      const auto c = F::plain(operation);
      const auto handle = F::make(there, c);
      F::expect_works(there, c, handle.get());
      ok(xd_comm_barrier(comm.get()));
    }
  });
}

TYPED_TEST(Resources, CommunicatorsAndHandlesLeaveNothing) {
  create_and_destroy<TypeParam>(6);
  const Usage before;
  create_and_destroy<TypeParam>(150);
  const Usage after;
  expect_nothing_left(before, after);
}

// Anything that a handle leaves in its communicator would grow for as long as that lives.
TYPED_TEST(Resources, HundredsOfHandlesLeaveNothingInTheirCommunicator) {
  using F = TypeParam;
  std::optional<Usage> before, after;
  on_every_rank([&](Rank& rank) {
    for (std::optional<Usage>* const usage : {&before, &after}) {
      for (std::size_t round = 0; round < (usage == &before ? 6 : 200); ++round) {
        F::make(rank, F::plain(F::kOperations[round % std::size(F::kOperations)]));
      }
      ok(xd_comm_barrier(rank.comm));
      if (rank.rank == 0 || !rank.threads) usage->emplace();
      ok(xd_comm_barrier(rank.comm));
    }
  });
  expect_nothing_left(*before, *after);
}

}  // namespace
}  // namespace xd::test
