// The experimental channels: puts into one rank's memory, with counts there. Every promise holds
// alike to ranks of this machine and of others.
#define XD_EXPERIMENTAL 1
#include <crossdock/channel.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <memory>
#include <string>

#include "conformance/case.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

struct DestroyChannel {
  void operator()(xd_channel* channel) const { xd_channel_destroy(channel); }
};
using Channel = std::unique_ptr<xd_channel, DestroyChannel>;

constexpr std::size_t kBytes = std::size_t{1} << 18;
constexpr std::uint32_t kSlots = 4;

bool has_channels(const Rank& rank) { return !rank.asynchronous(); }

// Memory of a channel, the lower half for the peer's puts, the upper one for puts from here.
struct End {
  std::byte* memory = nullptr;
  Channel channel;

  std::byte* source() const { return memory + kBytes / 2; }
};

int around(const Rank& rank) { return rank.num_ranks - 1 - rank.rank; }

End make_end(const Rank& rank, int peer) {
  ok(xd_mem_grow(rank.comm, kBytes));
  End end;
  void* memory = nullptr;
  ok(xd_mem_alloc(rank.comm, kBytes, &memory));
  end.memory = static_cast<std::byte*>(memory);
  std::memset(memory, 0, kBytes);
  xd_channel* made = nullptr;
  ok(xd_channel_create(rank.comm, peer, memory, kBytes, kSlots, &made));
  end.channel.reset(made);
  return end;
}

void expect_error(xd_status status, xd_status expected, const std::string& part) {
  EXPECT_EQ(status, expected);
  EXPECT_NE(std::string(xd_last_error()).find(part), std::string::npos) << xd_last_error();
}

TEST(Channel, CountsSayThatTheirBytesAreThere) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    constexpr std::size_t kPiece = 16384;
    for (std::uint64_t round = 1; round <= 20; ++round) {
      for (std::uint32_t slot = 0; slot < kSlots; ++slot) {
        std::byte* const from = end.source() + slot * kPiece;
        std::memset(from, static_cast<int>(round * kSlots + slot), kPiece);
        ok(xd_channel_put(end.channel.get(), slot * kPiece, from, kPiece, slot));
      }
      // In another order than they were made.
      for (std::uint32_t slot = kSlots; slot-- > 0;) {
        ok(xd_channel_wait(end.channel.get(), slot, round));
        for (std::size_t i = 0; i < kPiece; i += kPiece - 1) {
          EXPECT_EQ(end.memory[slot * kPiece + i], static_cast<std::byte>(round * kSlots + slot))
              << "round " << round << ", slot " << slot;
        }
      }
      ok(xd_channel_flush(end.channel.get()));
      ok(xd_comm_barrier(rank.comm));  // both have read
    }
  });
}

TEST(Channel, PutsWithoutBytesAreCounted) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    for (int i = 0; i < 100; ++i) ok(xd_channel_put(end.channel.get(), 0, nullptr, 0, 3));
    ok(xd_channel_wait(end.channel.get(), 3, 100));
    ok(xd_channel_wait(end.channel.get(), 2, 0));
    ok(xd_channel_flush(end.channel.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, ARankMayBeItsOwnPeer) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, rank.rank);
    std::memset(end.source(), 7, 100);
    ok(xd_channel_put(end.channel.get(), 5, end.source(), 100, 1));
    ok(xd_channel_wait(end.channel.get(), 1, 1));
    ok(xd_channel_flush(end.channel.get()));
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
    const Comm comm = rank.another_comm("quick", kBytes, 1000);
    Rank quick = rank;
    quick.comm = comm.get();
    const End end = make_end(quick, around(quick));
    expect_error(xd_channel_wait(end.channel.get(), 0, 1), XD_ERROR_TIMEOUT,
                 "waited 1000 ms for rank " + std::to_string(around(rank)) +
                     " to put: count 1 of slot 0 here");
    ok(xd_comm_barrier(rank.comm));
    ok(xd_channel_put(end.channel.get(), 0, end.source(), 8, 0));
    ok(xd_channel_wait(end.channel.get(), 0, 1));
    ok(xd_channel_flush(end.channel.get()));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, WhatDoesNotFitIsRefused) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const End end = make_end(rank, around(rank));
    xd_channel* const c = end.channel.get();
    expect_error(xd_channel_put(c, 0, end.source(), 8, kSlots), XD_ERROR_INVALID_ARGUMENT,
                 "slot = 4, expected less than 4");
    expect_error(xd_channel_put(c, kBytes - 7, end.source(), 8, 0), XD_ERROR_INVALID_ARGUMENT,
                 "to = " + std::to_string(kBytes - 7));
    expect_error(xd_channel_put(c, SIZE_MAX, end.source(), 8, 0), XD_ERROR_INVALID_ARGUMENT, "to");
    int elsewhere = 0;
    expect_error(xd_channel_put(c, 0, &elsewhere, sizeof(elsewhere), 0), XD_ERROR_INVALID_ARGUMENT,
                 "from");
    expect_error(xd_channel_wait(c, kSlots, 1), XD_ERROR_INVALID_ARGUMENT, "slot = 4");
    expect_error(xd_channel_put(nullptr, 0, nullptr, 0, 0), XD_ERROR_INVALID_ARGUMENT, "channel");
    ok(xd_channel_destroy(nullptr));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, RanksThatDoNotNameOneAnotherAreToldSo) {
  if (world().num_ranks() < 3) GTEST_SKIP() << "two ranks always name one another or themselves";
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    ok(xd_mem_grow(rank.comm, kBytes));
    void* memory = nullptr;
    ok(xd_mem_alloc(rank.comm, 64, &memory));
    xd_channel* made = nullptr;
    expect_error(
        xd_channel_create(rank.comm, (rank.rank + 1) % rank.num_ranks, memory, 64, 1, &made),
        XD_ERROR_MISMATCH, "rank 0 names rank 1 as its peer, which names rank 2");
    EXPECT_EQ(made, nullptr);
    expect_error(xd_channel_create(rank.comm, rank.rank, &made, 8, 1, &made),
                 XD_ERROR_INVALID_ARGUMENT, "symmetric");
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(Channel, IsThereOnTheCpuAlone) {
  on_every_rank([](Rank& rank) {
    if (has_channels(rank)) return;
    xd_channel* made = nullptr;
    expect_error(xd_channel_create(rank.comm, around(rank), nullptr, 0, 1, &made),
                 XD_ERROR_UNSUPPORTED, "on the CPU");
  });
}

}  // namespace
}  // namespace xd::test
