// Resources that the library takes from the process: none per step, the announced amount per group,
// and all of them given back in the end.
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/counted_new.h"
#include "conformance/expect_usage.h"
#include "conformance/ll_batch.h"
#include "conformance/quantised.h"
#include "support/gtest_main.h"

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

TEST(Resources, StepsAllocateNothing) {
  const std::vector<Carried> all = everything_carried();
  on_every_rank([&](Rank& rank) {
    for (const Carried& carried : all) expect_no_allocations(rank, carried);
  });
}

// Also in halves, and with the errors that take a turn.
TEST(Resources, LowLatencyStepsAllocateNothing) {
  LlCase c = plain_ll_case(world().num_ranks());
  c.row_units = 16;
  on_every_rank([&](Rank& rank) {
    for (const Sent sent : {Sent::as_they_are, Sent::e8m0}) {
      LlCase own = c;
      own.sent = sent;
      const Group group = make_group(rank, own);
      LlBatch batch(rank, own, 0);
      for (int round = 0; round < 4; ++round) {
        for (const xd_ep_operation operation : {XD_EP_LL_DISPATCH, XD_EP_LL_COMBINE}) {
          for (const xd_ep_phase phase :
               {XD_EP_PHASE_BOTH, XD_EP_PHASE_SEND, XD_EP_PHASE_RECEIVE}) {
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

// The lowest rank of each device, which asks for all ranks on it.
TEST(Resources, AGroupTakesWhatItSaidOfItsDevice) {
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

void expect_what_was_said(const xd_ep_config& config) {
  on_every_rank([&](Rank& rank) {
    HostMemoryTaken taken(rank);
    ok(xd_comm_barrier(rank.comm));
    taken.begin();
    ok(xd_comm_barrier(rank.comm));
    xd_ep_memory memory = XD_EP_MEMORY_INIT;
    ok(xd_ep_group_memory(&config, &memory));
    EXPECT_GT(memory.symmetric_bytes, memory.staging_bytes);
    const Group group = make_group(rank.comm, config);
    ok(xd_comm_barrier(rank.comm));
    taken.expect(memory.symmetric_bytes, memory.private_bytes);
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Resources, AGroupTakesWhatItSaid) {
  if (world().memory().device().device_type != kDLCPU) GTEST_SKIP() << "of the host's memory";
  Case c = plain_case(world().num_ranks());
  c.max_tokens = 500;
  expect_what_was_said(c.config(0));
  LlCase ll = plain_ll_case(world().num_ranks());
  ll.max_tokens = 500;
  const std::vector<std::int32_t> owners = ll.owners();
  for (const int in_flight : {2, 4}) {
    ll.in_flight = in_flight;
    expect_what_was_said(ll.config(owners));
  }
}

TEST(Resources, GroupsWithoutStagingSaveWhatWasSaid) {
  xd_ep_config config = plain_case(world().num_ranks()).config(0);
  xd_ep_memory staged = XD_EP_MEMORY_INIT;
  ok(xd_ep_group_memory(&config, &staged));
  config.staging = XD_EP_STAGING_NONE;
  xd_ep_memory unstaged = XD_EP_MEMORY_INIT;
  ok(xd_ep_group_memory(&config, &unstaged));
  EXPECT_EQ(staged.symmetric_bytes - staged.staging_bytes, unstaged.symmetric_bytes);
  EXPECT_EQ(unstaged.staging_bytes, 0u);
}

void create_and_destroy(int rounds) {
  const Case c = plain_case(world().num_ranks());
  const LlCase ll = plain_ll_case(world().num_ranks());
  on_every_rank([&](Rank& rank) {
    for (int round = 0; round < rounds; ++round) {
      const Comm comm = rank.another_comm("round" + std::to_string(round), 65536);
      Rank there = rank;
      there.comm = comm.get();
      const Group group = make_group(comm.get(), c.config(rank.rank));
      Batch batch(there, c, round, Place::symmetric);
      batch.prepare(group.get());
      ok(batch.call(group.get(), XD_EP_DISPATCH));
      const Group slots = make_group(there, ll);
      LlBatch(there, ll, round).dispatch(slots.get());
      ok(xd_comm_barrier(comm.get()));
    }
  });
}

TEST(Resources, TwoHundredCommunicatorsAndGroupsLeaveNothing) {
  create_and_destroy(5);
  const Usage before;
  create_and_destroy(200);
  const Usage after;
  expect_nothing_left(before, after);
}

void create_and_destroy_groups(const Rank& rank, int rounds) {
  const Case c = plain_case(rank.num_ranks);
  const LlCase ll = plain_ll_case(rank.num_ranks);
  for (int round = 0; round < rounds; ++round) {
    make_group(rank.comm, c.config(rank.rank));
    make_group(rank, ll);
  }
  ok(xd_comm_barrier(rank.comm));
}

TEST(Resources, TwoHundredGroupsLeaveNothingInTheirCommunicator) {
  std::optional<Usage> before, after;
  on_every_rank([&](Rank& rank) {
    for (std::optional<Usage>* const usage : {&before, &after}) {
      create_and_destroy_groups(rank, usage == &before ? 5 : 100);
      if (rank.rank == 0 || !rank.threads) usage->emplace();
      ok(xd_comm_barrier(rank.comm));
    }
  });
  expect_nothing_left(*before, *after);
}

}  // namespace
}  // namespace xd::test
