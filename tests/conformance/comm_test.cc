// Communicators from the caller's side: information, barrier, bad arguments.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>
#include <vector>

#include "support/gtest_main.h"

namespace xd::test {
namespace {

// XD_NET_TEST=apart makes machines of declared hosts.
std::ptrdiff_t ranks_on_machine_of(const Rank& rank) {
  if (rank.hosts.empty() || std::getenv("XD_NET_TEST") == nullptr) return rank.num_ranks;
  return std::ranges::count(rank.hosts, rank.hosts[static_cast<std::size_t>(rank.rank)]);
}

bool says(const char* words) {
  return std::string_view(xd_last_error()).find(words) != std::string_view::npos;
}

TEST(Communicator, KnowsItsRanks) {
  on_every_rank([](Rank& rank) {
    xd_comm_info info = XD_COMM_INFO_INIT;
    ok(xd_comm_get_info(rank.comm, &info));
    EXPECT_EQ(info.rank, rank.rank);
    EXPECT_EQ(info.num_ranks, rank.num_ranks);
    EXPECT_EQ(info.device.device_type, rank.memory->device().device_type);
    EXPECT_EQ(info.device.device_id, rank.memory->device().device_id);
    EXPECT_EQ(info.timeout_ms, Rank::kTimeoutMs);
    EXPECT_EQ(info.local_ranks, rank.threads ? rank.num_ranks : 1);
    EXPECT_EQ(info.near_ranks, ranks_on_machine_of(rank));
    EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
  });
}

void expect_hosts(xd_comm* comm, int num_hosts, int host) {
  xd_comm_info info = XD_COMM_INFO_INIT;
  ok(xd_comm_get_info(comm, &info));
  EXPECT_EQ(info.num_hosts, num_hosts);
  EXPECT_EQ(info.host, host);
}

TEST(Communicator, NumbersHostsByTheirLowestRanks) {
  on_every_rank([](Rank& rank) {
    Hosts one, turns;  // names whose numbers fall where those of hosts rise
    for (int r = 0; r < rank.num_ranks; ++r) {
      one.push_back(7);
      turns.push_back(9 - r % 3);
    }
    expect_hosts(rank.comm_on(one, "one", 0).get(), 1, 0);
    expect_hosts(rank.comm_on(turns, "turns", 0).get(), std::min(rank.num_ranks, 3), rank.rank % 3);
  });
}

// Processes of crossdock-run --hosts have XD_HOST_ID; one that holds all ranks does not.
TEST(Communicator, TakesTheHostOfXdHostIdWhereTheConfigNamesNone) {
  on_every_rank([](Rank& rank) {
    const Comm unnamed = rank.comm_on({}, "unnamed", 0);
    if (rank.hosts.empty() || rank.threads) return expect_hosts(unnamed.get(), 1, 0);
    expect_hosts(unnamed.get(), rank.hosts.back() + 1,
                 rank.hosts[static_cast<std::size_t>(rank.rank)]);
  });
}

TEST(Communicator, BarrierHoldsUntilAllHaveCome) {
  on_every_rank([](Rank& rank) {
    void* mine = nullptr;
    ok(xd_mem_alloc(rank.comm, sizeof(int), &mine));
    xd_mem_handle handle{};
    ok(xd_mem_export(rank.comm, mine, &handle));
    for (int round = 1; round <= 20; ++round) {
      rank.memory->copy_in(mine, &round, sizeof(round));
      ok(xd_comm_barrier(rank.comm));
      for (int peer = 0; peer < rank.num_ranks; ++peer) {
        const xd_mem_handle there{peer, handle.segment, handle.offset};
        void* seen = nullptr;
        ok(xd_mem_import(rank.comm, &there, &seen));
        int value = 0;
        rank.memory->copy_out(&value, seen, sizeof(value));
        EXPECT_EQ(value, round) << "rank " << peer;
      }
      ok(xd_comm_barrier(rank.comm));
    }
    ok(xd_mem_free(rank.comm, mine));
  });
}

// As many as fit into a round, and more; in place as well.
TEST(Communicator, AllGatherGivesEveryRankTheBytesOfAll) {
  on_every_rank([](Rank& rank) {
    const auto value = [](int r, std::size_t i) {
      return static_cast<unsigned char>(r * 37 + static_cast<int>(i % 251) + 1);
    };
    for (const std::size_t bytes : {std::size_t{1}, std::size_t{8}, std::size_t{32700},
                                    std::size_t{32704}, std::size_t{32705}, std::size_t{200000}}) {
      for (const bool in_place : {false, true}) {
        const std::size_t own = static_cast<std::size_t>(rank.rank) * bytes;
        std::vector<unsigned char> input(bytes);
        for (std::size_t i = 0; i < bytes; ++i) input[i] = value(rank.rank, i);
        std::vector<unsigned char> output(static_cast<std::size_t>(rank.num_ranks) * bytes + 1,
                                          0xEE);
        if (in_place) std::copy(input.begin(), input.end(), &output[own]);
        const void* from = in_place ? &output[own] : input.data();
        ok(xd_comm_all_gather(rank.comm, from, output.data(), bytes));
        for (std::size_t i = 0; i + 1 < output.size(); ++i) {
          const unsigned char expected = value(static_cast<int>(i / bytes), i % bytes);
          ASSERT_EQ(output[i], expected) << bytes << " bytes, at " << i;
        }
        EXPECT_EQ(output.back(), 0xEE);
      }
    }
    ok(xd_comm_all_gather(rank.comm, nullptr, nullptr, 0));
  });
}

// A mistake of one rank reaches all, writes nothing, and costs no more than the call.
TEST(Communicator, AllGatherTellsAllOfOneMistake) {
  on_every_rank([](Rank& rank) {
    if (rank.num_ranks == 1) return;
    const int guilty = rank.num_ranks - 1;
    const bool mine = rank.rank == guilty;
    std::vector<std::int64_t> output(static_cast<std::size_t>(rank.num_ranks) + 1, -7);
    const std::int64_t input = rank.rank;
    const auto call = [&](const void* from, void* to, std::size_t bytes) {
      const xd_status status = xd_comm_all_gather(rank.comm, from, to, bytes);
      for (const std::int64_t value : output) EXPECT_EQ(value, -7);
      return status;
    };
    const xd_status of_pointer = mine ? XD_ERROR_INVALID_ARGUMENT : XD_ERROR_MISMATCH;
    EXPECT_EQ(call(mine ? nullptr : &input, output.data(), sizeof(input)), of_pointer);
    EXPECT_TRUE(says("input = NULL, expected 8 bytes")) << xd_last_error();
    EXPECT_EQ(call(&input, mine ? nullptr : output.data(), sizeof(input)), of_pointer);
    EXPECT_TRUE(says("output = NULL")) << xd_last_error();
    EXPECT_EQ(call(&input, output.data(), mine ? SIZE_MAX / 2 + 1 : 8), of_pointer);
    EXPECT_TRUE(says("expected at most")) << xd_last_error();
    EXPECT_EQ(call(&input, output.data(), mine ? 4 : 8), XD_ERROR_MISMATCH);
    EXPECT_TRUE(says("expected equal values")) << xd_last_error();
    ok(xd_comm_all_gather(rank.comm, &input, output.data(), sizeof(input)));
    for (int r = 0; r < rank.num_ranks; ++r) EXPECT_EQ(output[static_cast<std::size_t>(r)], r);
  });
}

TEST(Communicator, ConfigsThatNameNoRankAreRefused) {
  on_every_rank([](Rank& rank) {
    const auto refused = [&](auto change) {
      xd_comm_config config = XD_COMM_CONFIG_INIT;
      config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
      config.rank = rank.rank;
      config.num_ranks = rank.num_ranks;
      config.device = rank.memory->device();
      change(config);
      xd_comm* comm = nullptr;
      EXPECT_EQ(xd_comm_create(&config, &comm), XD_ERROR_INVALID_ARGUMENT) << xd_last_error();
      EXPECT_EQ(comm, nullptr);
    };
    refused([](xd_comm_config& config) { config.rank = -1; });
    refused([](xd_comm_config& config) { config.rank = config.num_ranks; });
    refused([](xd_comm_config& config) { config.num_ranks = 1025; });
    refused([](xd_comm_config& config) { config.bootstrap = static_cast<xd_bootstrap>(3); });
    if (rank.num_ranks > 1) {  // a rank alone needs no meeting
      refused([](xd_comm_config& config) { config.bootstrap = XD_BOOTSTRAP_UNIQUE_ID; });
      refused([](xd_comm_config& config) { config.bootstrap = XD_BOOTSTRAP_ALL_GATHER; });
    }
    refused([](xd_comm_config& config) { config.timeout_ms = -1; });
    refused([](xd_comm_config& config) { config.host = ""; });
    refused([](xd_comm_config& config) { config.struct_size = 0; });
    EXPECT_EQ(xd_comm_create(nullptr, nullptr), XD_ERROR_INVALID_ARGUMENT);
  });
}

TEST(Communicator, AnExecutorThatIsNotThereIsUnsupported) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUDA, &reason)) GTEST_SKIP() << "CUDA is there";
  on_every_rank([](Rank& rank) {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
    config.rank = rank.rank;
    config.num_ranks = rank.num_ranks;
    config.device = {kDLCUDA, 0};
    config.timeout_ms = Rank::kTimeoutMs;
    config.name = "cuda";
    xd_comm* comm = nullptr;
    EXPECT_EQ(xd_comm_create(&config, &comm), XD_ERROR_UNSUPPORTED) << xd_last_error();
    EXPECT_EQ(comm, nullptr);
  });
}

TEST(Communicator, NullHandlesAreRefusedOrIgnored) {
  if (!world().reports()) return;  // no rank is needed
  xd_comm_info info = XD_COMM_INFO_INIT;
  EXPECT_EQ(xd_comm_destroy(nullptr), XD_SUCCESS);
  EXPECT_EQ(xd_ep_group_destroy(nullptr), XD_SUCCESS);
  EXPECT_EQ(xd_comm_barrier(nullptr), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_comm_all_gather(nullptr, nullptr, nullptr, 0), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_comm_abort(nullptr), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_comm_get_info(nullptr, &info), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_mem_alloc(nullptr, 1, nullptr), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_ep_dispatch(nullptr, nullptr, nullptr), XD_ERROR_INVALID_ARGUMENT);
  EXPECT_EQ(xd_ep_group_create(nullptr, nullptr, nullptr), XD_ERROR_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace xd::test
