// Channels of a rank process, which makes and uses them when it is told to.
#pragma once

#ifndef XD_EXPERIMENTAL
#define XD_EXPERIMENTAL 1
#endif
#include <crossdock/channel.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace xd::test {

// "fine", or the error of this thread's last call with its text.
std::string outcome(xd_status status);

// A channel to every rank, of a number of ranks that is a power of two. Calls return "fine", or
// the error with its text.
class RankChannels {
 public:
  RankChannels(xd_comm* comm, int rank, int num_ranks)
      : comm_(comm), rank_(rank), ranks_(static_cast<std::size_t>(num_ranks)) {}

  std::string make();
  // Puts and waits for one count more than before, without a flush.
  std::string put(int peer);
  std::string wait(int peer);
  // Whether that count is there: "fine", "not yet" or the error.
  std::string ask(int peer);
  std::string flush(int peer);
  // Swaps rows with a peer, or with all ranks at once (-1), and checks what comes.
  std::string swap(int peer, int rounds);

 private:
  struct Destroy {
    void operator()(xd_channel* channel) const { xd_channel_destroy(channel); }
  };
  struct ToRank {
    std::unique_ptr<xd_channel, Destroy> channel;
    std::uint64_t heard[2]{};  // by slot: of puts alone, and of swaps
  };

  ToRank& to(int peer) { return ranks_[static_cast<std::size_t>(peer)]; }
  std::string swap_once(const std::vector<int>& peers, int round);
  std::string hear(int peer, int round);

  xd_comm* const comm_;
  const int rank_;
  std::byte* memory_ = nullptr;
  std::vector<ToRank> ranks_;
};

}  // namespace xd::test
