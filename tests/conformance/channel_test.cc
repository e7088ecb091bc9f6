// The experimental channels: puts into one rank's memory, with counts there. Every promise holds
// alike to ranks of this machine and of others.
#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "conformance/channel_end.h"

namespace xd::test {
namespace {

using std::chrono::milliseconds;
using Clock = std::chrono::steady_clock;

// Counts of the channel's first counters that tests wait for.
void hear(const End& end, std::uint32_t counter, std::uint64_t count = 1) {
  ok(xd_channel_wait(end.get(), counter, count));
}
void say(const End& end, std::uint32_t counter) {
  ok(xd_channel_put(end.get(), 0, nullptr, 0, counter));
}

TEST(Channel, CountsSayThatTheirBytesAreThere) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    constexpr std::size_t kPiece = 16384;
    for (std::uint64_t round = 1; round <= 20; ++round) {
      for (std::uint32_t counter = 0; counter < End::kCounters; ++counter) {
        std::byte* const from = end.source() + counter * kPiece;
        std::memset(from, static_cast<int>(round * End::kCounters + counter), kPiece);
        ok(xd_channel_put(end.get(), counter * kPiece, from, kPiece, counter));
      }
      // In another order than they were made.
      for (std::uint32_t counter = End::kCounters; counter-- > 0;) {
        ok(xd_channel_wait(end.get(), counter, round));
        for (std::size_t i = 0; i < kPiece; i += kPiece - 1) {
          EXPECT_EQ(end.memory[counter * kPiece + i],
                    static_cast<std::byte>(round * End::kCounters + counter))
              << "round " << round << ", counter " << counter;
        }
      }
      ok(xd_channel_flush(end.get()));
      ok(xd_comm_barrier(rank.comm));  // both have read
    }
  });
}

TEST(Channel, PutsWithoutBytesAreCounted) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    for (int i = 0; i < 100; ++i) ok(xd_channel_put(end.get(), 0, nullptr, 0, 3));
    ok(xd_channel_wait(end.get(), 3, 100));
    ok(xd_channel_wait(end.get(), 2, 0));
    ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, ARankMayBeItsOwnPeer) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, rank.rank);
    std::memset(end.source(), 7, 100);
    ok(xd_channel_put(end.get(), 5, end.source(), 100, 1));
    ok(xd_channel_wait(end.get(), 1, 1));
    ok(xd_channel_flush(end.get()));
    EXPECT_EQ(end.memory[4], std::byte{0});
    EXPECT_EQ(end.memory[5], std::byte{7});
    EXPECT_EQ(end.memory[104], std::byte{7});
    EXPECT_EQ(end.memory[105], std::byte{0});
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, AWaitEndsInTimeAndTheChannelGoesOn) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const Comm comm = rank.another_comm("quick", End::kBytes, 3000);
    Rank quick = rank;
    quick.comm = comm.get();
    const End end = make_end(quick, around(quick));
    expect_error(xd_channel_wait(end.get(), 0, 1), XD_ERROR_TIMEOUT,
                 "waited 3000 ms for rank " + std::to_string(around(rank)) +
                     " to put: count 1 of counter 0 here");
    ok(xd_comm_barrier(rank.comm));
    ok(xd_channel_put(end.get(), 0, end.source(), 8, 0));
    ok(xd_channel_wait(end.get(), 0, 1));
    ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, WhatDoesNotFitIsRefused) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    xd_channel* const c = end.get();
    expect_error(xd_channel_put(c, 0, end.source(), 8, End::kCounters), XD_ERROR_INVALID_ARGUMENT,
                 "counter = 4, expected less than 4");
    expect_error(xd_channel_put(c, End::kBytes - 7, end.source(), 8, 0), XD_ERROR_INVALID_ARGUMENT,
                 "to = " + std::to_string(End::kBytes - 7));
    expect_error(xd_channel_put(c, SIZE_MAX, end.source(), 8, 0), XD_ERROR_INVALID_ARGUMENT, "to");
    int elsewhere = 0;
    expect_error(xd_channel_put(c, 0, &elsewhere, sizeof(elsewhere), 0), XD_ERROR_INVALID_ARGUMENT,
                 "from");
    expect_error(xd_channel_wait(c, End::kCounters, 1), XD_ERROR_INVALID_ARGUMENT, "counter = 4");
    expect_error(xd_channel_put(nullptr, 0, nullptr, 0, 0), XD_ERROR_INVALID_ARGUMENT, "channel");
    ok(xd_channel_destroy(nullptr));
    ok(xd_comm_barrier(rank.comm));
  });
}

// Waits until `got` holds; false = it has not for a while.
template <class Got>
bool comes(Got&& got) {
  const auto end = Clock::now() + milliseconds(Rank::kTimeoutMs);
  while (!got()) {
    if (Clock::now() > end) return false;
    std::this_thread::yield();
  }
  return true;
}

bool has_reached(const End& end, std::uint32_t counter, std::uint64_t count) {
  std::int32_t reached = -1;
  ok(xd_channel_test(end.get(), counter, count, &reached));
  EXPECT_TRUE(reached == 0 || reached == 1) << reached;
  return reached == 1;
}

TEST(Channel, AskingTellsWhetherACountIsReachedAndNeverWaits) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    const auto before = Clock::now();
    for (int i = 0; i < 10; ++i) EXPECT_FALSE(has_reached(end, 1, 2));
    EXPECT_TRUE(has_reached(end, 1, 0));
    EXPECT_LT(Clock::now() - before, milliseconds(Rank::kTimeoutMs / 4));
    ok(xd_comm_barrier(rank.comm));
    std::memset(end.source(), 9, 64);
    for (int i = 0; i < 2; ++i) ok(xd_channel_put(end.get(), 0, end.source(), 64, 1));
    // Nobody waits: what is under way gets on by this question alone.
    EXPECT_TRUE(comes([&] { return has_reached(end, 1, 2); }));
    EXPECT_EQ(end.memory[63], std::byte{9});
    EXPECT_FALSE(has_reached(end, 1, 3));
    ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
    std::int32_t reached = 0;
    expect_error(xd_channel_test(end.get(), End::kCounters, 1, &reached), XD_ERROR_INVALID_ARGUMENT,
                 "counter = 4");
    expect_error(xd_channel_test(end.get(), 0, 1, nullptr), XD_ERROR_INVALID_ARGUMENT, "reached");
  });
}

// The peer calls nothing until the put has returned: they are connected.
TEST(Channel, TheFirstPutNeedsNothingOfThePeer) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const Comm comm = rank.another_comm("first", End::kBytes, 5000);
    Rank quick = rank;
    quick.comm = comm.get();
    const End end = make_end(quick, around(quick));
    ok(xd_comm_barrier(rank.comm));
    const bool is_first = rank.rank <= around(rank);
    if (is_first) ok(xd_channel_put(end.get(), 0, end.source(), 8, 0));
    ok(xd_comm_barrier(rank.comm));
    if (is_first) {
      if (rank.rank != around(rank)) hear(end, 1);
    } else {
      hear(end, 0);
      say(end, 1);
    }
    ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

// The number behind these words in the last error's text.
std::size_t number_behind(const std::string& words) {
  const std::string text = xd_last_error();
  const std::size_t at = text.find(words);
  return at == std::string::npos ? 0 : std::stoul(text.substr(at + words.size()));
}

// XD_NET_TEST bounds puts where this test is launched for it; the limits of networks are as long as
// the memory of a test, or longer.
TEST(Channel, APutThatTheNetworkDoesNotTakeIsRefusedWithTheLongestThatItTakes) {
  const char* const net_test = std::getenv("XD_NET_TEST");
  const bool bounded = net_test != nullptr && std::strstr(net_test, "put=") != nullptr;
  on_every_rank([&](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    constexpr std::size_t kHalf = End::kBytes / 2;
    std::memset(end.source(), 9, kHalf);
    std::size_t most = kHalf;
    if (bounded) {
      expect_error(xd_channel_put(end.get(), 0, end.source(), kHalf, 0), XD_ERROR_INVALID_ARGUMENT,
                   "bytes = " + std::to_string(kHalf) + ", expected at most ");
      most = number_behind("expected at most ");
      EXPECT_GT(most, 0u);
      expect_error(xd_channel_put(end.get(), 0, end.source(), most + 1, 0),
                   XD_ERROR_INVALID_ARGUMENT, "in one put");
    }
    ok(xd_channel_put(end.get(), 0, end.source(), most, 0));
    hear(end, 0);
    EXPECT_EQ(end.memory[most - 1], std::byte{9});
    EXPECT_EQ(end.memory[most], most < kHalf ? std::byte{0} : std::byte{9});
    ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

// No wait of the channel on which a rank has put gets on with that put.
TEST(Channel, AWaitOfOneChannelGetsOnWithPutsOfAnother) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank) || rank.rank == around(rank)) {
      if (has_channels(rank))
        for (int i = 0; i < 2; ++i) make_end(rank, rank.rank);
      return ok(xd_comm_barrier(rank.comm));
    }
    const End there = make_end(rank, around(rank)), back = make_end(rank, around(rank));
    for (std::uint64_t round = 1; round <= 10; ++round) {
      if (rank.rank < around(rank)) {
        ok(xd_channel_put(there.get(), 0, there.source(), End::kBytes / 2, 0));
        hear(back, 0, round);
      } else {
        hear(there, 0, round);
        say(back, 0);
      }
    }
    for (const End* end : {&there, &back}) ok(xd_channel_flush(end->get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

// A circle of ranks, in which every second way may lead to another machine.
TEST(Channel, AWaitForANearRankGetsOnWithPutsToOthers) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank) || rank.num_ranks % 2 != 0) return;
    const int next = (rank.rank + 1) % rank.num_ranks;
    const int before = (rank.rank + rank.num_ranks - 1) % rank.num_ranks;
    const bool is_even = rank.rank % 2 == 0;
    // Every pair makes its channel in the same call.
    const End with_even = make_end(rank, is_even ? next : before);
    const End with_odd = make_end(rank, is_even ? before : next);
    const End& from = is_even ? with_odd : with_even;
    const End& to = is_even ? with_even : with_odd;
    for (std::uint64_t round = 1; round <= 10; ++round) {
      if (rank.rank == 0) {
        ok(xd_channel_put(to.get(), 0, to.source(), End::kBytes / 2, 0));
        hear(from, 0, round);
      } else {
        hear(from, 0, round);
        ok(xd_channel_put(to.get(), 0, to.source(), End::kBytes / 2, 0));
      }
      // Nothing of this round is flushed yet. Its answer comes the other way.
      if (rank.rank == 0) {
        say(from, 1);
        hear(to, 1, round);
      } else {
        hear(to, 1, round);
        say(from, 1);
      }
    }
    for (const End* end : {&from, &to}) ok(xd_channel_flush(end->get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

// Threads of one rank, each with a channel: what one takes in for the other wakes it.
TEST(Channel, EachMayHaveAThreadOfItsOwn) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End ends[] = {make_end(rank, around(rank)), make_end(rank, around(rank))};
    xd_status statuses[2]{};
    const auto swap = [&](std::size_t which) {
      const End& end = ends[which];
      xd_status& status = statuses[which];
      for (std::uint64_t round = 1; round <= 50 && status == XD_SUCCESS; ++round) {
        status = xd_channel_put(end.get(), 0, end.source(), 1000, 0);
        if (status == XD_SUCCESS) status = xd_channel_wait(end.get(), 0, round);
        if (status == XD_SUCCESS) status = xd_channel_flush(end.get());
      }
    };
    std::thread other([&] { swap(1); });
    swap(0);
    other.join();
    EXPECT_EQ(statuses[0], XD_SUCCESS);
    EXPECT_EQ(statuses[1], XD_SUCCESS);
    ok(xd_comm_barrier(rank.comm));
  });
}

// Where losses are masked they are that of the channel to the lost rank, and of no other.
TEST(Channel, ALostPeerIsToldByItsChannelsAlone) {
  if (world().num_ranks() < 3) GTEST_SKIP() << "needs a rank that is no part of the lost channel";
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    Comm comm =
        rank.another_comm("masking", 2 * End::kBytes, Rank::kTimeoutMs, XD_COMM_PEER_LOSS_MASK);
    Rank masking = rank;
    masking.comm = comm.get();
    End to_peer = make_end(masking, around(masking)), own = make_end(masking, rank.rank);
    ok(xd_comm_barrier(rank.comm));
    const int leaving = rank.num_ranks - 1;
    if (rank.rank == leaving) {
      to_peer.channel.reset();
      own.channel.reset();
      comm.reset();
    } else {
      std::vector<std::int32_t> lost(static_cast<std::size_t>(rank.num_ranks));
      EXPECT_TRUE(comes([&] {
        ok(xd_comm_lost(comm.get(), lost.data()));
        return lost.back() != 0;
      }));
    }
    if (rank.rank == 0) {
      const std::string gone = "rank " + std::to_string(leaving);
      std::int32_t reached = 0;
      const auto before = Clock::now();
      for (int again = 0; again < 2; ++again) {
        expect_error(xd_channel_put(to_peer.get(), 0, to_peer.source(), 8, 0), XD_ERROR_PEER_LOST,
                     gone);
        expect_error(xd_channel_wait(to_peer.get(), 0, 1), XD_ERROR_PEER_LOST, gone);
        expect_error(xd_channel_test(to_peer.get(), 0, 1, &reached), XD_ERROR_PEER_LOST, gone);
      }
      EXPECT_LT(Clock::now() - before, milliseconds(Rank::kTimeoutMs / 4));
      EXPECT_EQ(comm_error(comm.get()).status, XD_SUCCESS);
    }
    if (rank.rank != leaving) {
      say(own, 0);
      hear(own, 0);
      if (rank.rank != 0) {
        say(to_peer, 0);
        hear(to_peer, 0);
        ok(xd_channel_flush(to_peer.get()));
      }
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

}  // namespace
}  // namespace xd::test
