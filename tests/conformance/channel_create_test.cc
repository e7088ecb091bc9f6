// Making the experimental channels: what is refused, on which ranks, and what they take.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "conformance/channel_end.h"
#include "conformance/one_mistake.h"
#include "support/usage.h"

namespace xd::test {
namespace {

using Create = std::function<xd_status(xd_channel**)>;

TEST(ChannelCreate, TellsAllRanksOfAMistakeOfOne) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    ok(xd_mem_grow(rank.comm, 1 << 16));
    std::byte* const memory = symmetric_memory(rank, 4096);
    const int peer = around(rank);
    const auto create = [&](int to, const void* symmetric, std::size_t bytes,
                            std::uint32_t counters, xd_channel** made) {
      return xd_channel_create(rank.comm, to, symmetric, bytes, counters, made);
    };
    const Create right = [&](xd_channel** made) { return create(peer, memory, 4096, 1, made); };
    const auto expect = [&](const std::string& part, const Create& wrong) {
      expect_mistake<xd_channel*>(rank, part, nullptr, wrong, right);
    };
    expect("channel = NULL", [&](xd_channel**) { return create(peer, memory, 4096, 1, nullptr); });
    expect("symmetric", [&](xd_channel** made) { return create(peer, nullptr, 64, 1, made); });
    expect("symmetric", [&](xd_channel** made) { return create(peer, nullptr, 0, 1, made); });
    int elsewhere = 0;
    expect("symmetric", [&](xd_channel** made) { return create(peer, &elsewhere, 4, 1, made); });
    expect("peer = -1", [&](xd_channel** made) { return create(-1, memory, 64, 1, made); });
    expect("counters = 0", [&](xd_channel** made) { return create(peer, memory, 64, 0, made); });
    expect("counters = 65537",
           [&](xd_channel** made) { return create(peer, memory, 64, 65537, made); });
    // Within the segment, and not within one allocation.
    void* freed = symmetric_memory(rank, 4096);
    ok(xd_mem_free(rank.comm, freed));
    expect("symmetric", [&](xd_channel** made) { return create(peer, freed, 64, 1, made); });
    expect("symmetric", [&](xd_channel** made) { return create(peer, memory, 4097, 1, made); });
    expect("symmetric",
           [&](xd_channel** made) { return create(peer, memory + 4000, 97, 1, made); });
    xd_channel* made = nullptr;
    ok(create(peer, memory + 96, 4000, 1, &made));
    const Channel channel(made);
    ok(xd_channel_put(made, 3992, memory + 96, 8, 0));
    ok(xd_channel_wait(made, 0, 1));
    ok(xd_channel_flush(made));
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(ChannelCreate, TellsRanksThatDoNotNameOneAnother) {
  if (world().num_ranks() < 3) GTEST_SKIP() << "two ranks always name one another or themselves";
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    ok(xd_mem_grow(rank.comm, End::kBytes));
    std::byte* const memory = symmetric_memory(rank, 64);
    xd_channel* made = nullptr;
    expect_error(
        xd_channel_create(rank.comm, (rank.rank + 1) % rank.num_ranks, memory, 64, 1, &made),
        XD_ERROR_MISMATCH, "rank 0 names rank 1 as its peer, which names rank 2");
    EXPECT_EQ(made, nullptr);
    ok(xd_comm_barrier(rank.comm));
  });
}

TEST(ChannelCreate, WorksOnTheCpuAlone) {
  on_every_rank([](Rank& rank) {
    if (has_channels(rank)) return;
    xd_channel* made = nullptr;
    expect_error(xd_channel_create(rank.comm, around(rank), nullptr, 0, 1, &made),
                 XD_ERROR_UNSUPPORTED, "on the CPU");
  });
}

// A rank has one engine for all its channels, and gives back what else they take.
TEST(ChannelCreate, TakesNoDescriptorsButWithTheFirst) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const Comm comm = rank.another_comm("many", 2 * End::kBytes);
    Rank there = rank;
    there.comm = comm.get();
    std::vector<End> ends;
    ends.push_back(make_end(there, around(rank)));
    std::byte* const memory = ends[0].memory;
    ok(xd_comm_barrier(rank.comm));
    // One rank of each process looks, as looking takes a descriptor.
    const bool looks = !rank.threads || rank.rank == 0;
    const std::size_t with_one = looks ? open_descriptors() : 0;
    ok(xd_comm_barrier(rank.comm));
    for (int i = 0; i < 20; ++i) {
      xd_channel* made = nullptr;
      ok(xd_channel_create(comm.get(), around(rank), memory, End::kBytes, End::kCounters, &made));
      ends.push_back({.memory = memory, .channel = Channel(made)});
      if (i % 2 == 0) ends.pop_back();
    }
    for (const End& end : ends) ok(xd_channel_put(end.get(), 8, memory + End::kBytes / 2, 8, 2));
    for (const End& end : ends) ok(xd_channel_wait(end.get(), 2, 1));
    for (const End& end : ends) ok(xd_channel_flush(end.get()));
    ok(xd_comm_barrier(rank.comm));
    if (looks) {
      EXPECT_LE(open_descriptors(), with_one);
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

// A put to an end that is there no more is counted by no end that has come after it.
TEST(ChannelCreate, KnowsNothingOfPutsToEarlierChannels) {
  on_every_rank([](Rank& rank) {
    if (!has_channels(rank)) return;
    const Comm comm = rank.another_comm("earlier", 2 * End::kBytes);
    Rank there = rank;
    there.comm = comm.get();
    for (int i = 0; i < 10; ++i) {
      const End end = make_end(there, around(rank));
      ok(xd_channel_put(end.get(), 0, nullptr, 0, 0));  // may come when that end is gone
      std::int32_t reached = 0;
      ok(xd_channel_test(end.get(), 0, 2, &reached));
      EXPECT_EQ(reached, 0);
      ok(xd_mem_free(comm.get(), end.memory));
    }
    ok(xd_comm_barrier(rank.comm));
  });
}

}  // namespace
}  // namespace xd::test
