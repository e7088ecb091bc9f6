// Ends of channels as the tests make them.
#pragma once

#ifndef XD_EXPERIMENTAL
#define XD_EXPERIMENTAL 1
#endif
#include <crossdock/channel.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>

#include "conformance/one_mistake.h"
#include "support/gtest_main.h"

namespace xd::test {

struct DestroyChannel {
  void operator()(xd_channel* channel) const { xd_channel_destroy(channel); }
};
using Channel = std::unique_ptr<xd_channel, DestroyChannel>;

inline bool has_channels(const Rank& rank) { return !rank.asynchronous(); }

// Memory of a channel, the lower half for the peer's puts, the upper one for puts from here.
struct End {
  static constexpr std::size_t kBytes = std::size_t{1} << 18;
  static constexpr std::uint32_t kCounters = 4;

  std::byte* memory = nullptr;
  Channel channel;

  xd_channel* get() const { return channel.get(); }
  std::byte* source() const { return memory + kBytes / 2; }
};

// Ranks from the outside in: over two hosts of equal size all pairs lie between them.
inline int around(const Rank& rank) { return rank.num_ranks - 1 - rank.rank; }

inline std::byte* symmetric_memory(const Rank& rank, std::size_t bytes) {
  void* memory = nullptr;
  ok(xd_mem_alloc(rank.comm, bytes, &memory));
  std::memset(memory, 0, bytes);
  return static_cast<std::byte*>(memory);
}

inline End make_end(const Rank& rank, int peer) {
  ok(xd_mem_grow(rank.comm, End::kBytes));
  End end{.memory = symmetric_memory(rank, End::kBytes), .channel = {}};
  xd_channel* made = nullptr;
  ok(xd_channel_create(rank.comm, peer, end.memory, End::kBytes, End::kCounters, &made));
  end.channel.reset(made);
  return end;
}

}  // namespace xd::test
