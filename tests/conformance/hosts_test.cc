// Sums over ranks that have named several hosts: their order is that of the declared map, whichever
// it is.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/host_maps.h"
#include "conformance/step.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// The grid's reference has the hosts, so every element of combine and dispatch_bwd is compared.
TEST(Hosts, EveryElementOfEveryOutputIsRightOnEveryMap) {
  on_every_rank([](Rank& rank) {
    spread_over_maps(rank, all_cases(rank.num_ranks), 16, [](const Rank& there, const Case& c) {
      const Group group = make_group(there.comm, c.config(there.rank));
      Step(there, c, group.get(), 0).run_all();
    });
  });
}

// A batch of two tokens on each of four ranks. Every token chooses the one expert of every rank,
// whose row of the token is all `value[rank]`.
class FourRanks {
 public:
  explicit FourRanks(const Rank& rank) : rank_(rank) {
    config_.num_ranks = config_.num_experts = 4;
    config_.max_topk = 4;
    config_.max_tokens_per_rank = kTokens;
    config_.hidden = kHidden;
  }
  xd_ep_config& config() { return config_; }

  // The first element of each token's sum on a communicator of these hosts.
  std::vector<std::uint16_t> sums_on(xd_comm* comm, const std::vector<std::uint16_t>& first,
                                     const std::vector<std::uint16_t>& second) {
    const Group group = make_group(comm, config_);
    Buffer plan = prepare(group.get());
    const auto me = static_cast<std::size_t>(rank_.rank);
    std::vector<std::uint16_t> rows;
    for (int source = 0; source < 4; ++source) {
      rows.insert(rows.end(), kHidden, first[me]);
      rows.insert(rows.end(), kHidden, second[me]);
    }
    Tensor expert_out(rank_, kBf16, {std::int64_t{4} * kTokens, kHidden});
    expert_out.write(rows);
    Tensor out(rank_, kBf16, {kTokens, kHidden});
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    set_plan(args, plan);
    args.expert_out = expert_out.dl();
    args.out = out.dl();
    EXPECT_EQ(finish(rank_, group.get(), xd_ep_combine(group.get(), &args, rank_.stream())),
              XD_SUCCESS);
    const auto sums = out.read_as<std::uint16_t>();
    return {sums[0], sums[kHidden]};
  }

  Buffer prepare(xd_ep_group* group) {
    Tensor ids(rank_, kI32, {kTokens, 4});
    ids.write(std::vector<std::int32_t>{0, 1, 2, 3, 3, 2, 1, 0});
    Buffer plan = make_plan(rank_, config_);
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = ids.dl();
    set_plan(args, plan);
    EXPECT_EQ(finish(rank_, group, xd_ep_prepare(group, &args, rank_.stream())), XD_SUCCESS);
    return plan;
  }

  static constexpr int kTokens = 2, kHidden = 8;

 private:
  const Rank& rank_;
  xd_ep_config config_ = XD_EP_CONFIG_INIT;
};

constexpr std::uint16_t kOne = 0x3F80, kThree = 0x4040, k256 = 0x4380, k260 = 0x4382, k262 = 0x4383;

// bf16 has eight bits: from 256 to 512 only even numbers, and a sum midway goes to the multiple of
// four. Written out for 256 + 3 + 1 + 1 and 256 + 1 + 3 + 1 of ranks 0 to 3:
//   one host   261 -> 260                              261 -> 260
//   01|23      259 -> 260, 2;         262              257 -> 256, 4;        260
//   02|13      257 -> 256, 4;         260              259 -> 260, 2;        262
//   0|1|2|3    261 -> 260                              261 -> 260
TEST(Hosts, TheirSumsAreRoundedByThemselves) {
  if (world().num_ranks() != 4) GTEST_SKIP() << "written out for four ranks";
  struct Expected {
    Hosts hosts;
    std::uint16_t first, second;
  };
  const std::vector<Expected> table{{{0, 0, 0, 0}, k260, k260},
                                    {{0, 0, 1, 1}, k262, k260},
                                    {{0, 1, 0, 1}, k260, k262},
                                    {{0, 1, 2, 3}, k260, k260}};
  on_every_rank([&](Rank& rank) {
    FourRanks batch(rank);
    for (std::size_t i = 0; i < table.size(); ++i) {
      SCOPED_TRACE("map " + std::to_string(i));
      const Comm comm = rank.comm_on(table[i].hosts, "map" + std::to_string(i), 0);
      EXPECT_EQ(batch.sums_on(comm.get(), {k256, kThree, kOne, kOne}, {k256, kOne, kThree, kOne}),
                (std::vector{table[i].first, table[i].second}));
      ok(xd_comm_barrier(comm.get()));
    }
  });
}

// A saved plan would bring sums of another order.
TEST(Hosts, APlanOfOtherHostsIsRefused) {
  if (world().num_ranks() != 4) GTEST_SKIP() << "written out for four ranks";
  on_every_rank([](Rank& rank) {
    FourRanks batch(rank);
    const Comm pairs = rank.comm_on({0, 0, 1, 1}, "pairs", 0);
    const Comm turns = rank.comm_on({0, 1, 0, 1}, "turns", 0);
    const Group group = make_group(pairs.get(), batch.config());
    const Group other = make_group(turns.get(), batch.config());
    Buffer plan = batch.prepare(group.get());
    Tensor expert_out(rank, kBf16, {8, FourRanks::kHidden}), out(rank, kBf16, {2, 8});
    xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
    set_plan(args, plan);
    args.expert_out = expert_out.dl();
    args.out = out.dl();
    const Outcome outcome =
        finish(rank, other.get(), xd_ep_combine(other.get(), &args, rank.stream()));
    EXPECT_EQ(outcome, XD_ERROR_INVALID_ARGUMENT);
    EXPECT_TRUE(outcome.mentions("on other hosts than this communicator's")) << outcome.text;
    ok(xd_comm_barrier(turns.get()));
    ok(xd_comm_barrier(pairs.get()));
  });
}

}  // namespace
}  // namespace xd::test
