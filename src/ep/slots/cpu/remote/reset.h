// A reset of a group of low latency between machines (turn/host/reset.h): ranks say what they have
// to say in messages, in frames of their own, one for each round.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <type_traits>
#include <vector>

#include "ep/slots/config.h"
#include "net/links.h"
#include "turn/host/reset.h"

namespace xd::ep::cpu {

struct ResetMessage {
  std::uint32_t round;
  std::int32_t source;  // the rank that has sent it
  turn::ResetRound said;
};
static_assert(std::has_unique_object_representations_v<ResetMessage>);

// The thread that makes a call of the group calls all of it; the links throw where they fail.
class LlRemoteReset final : public turn::RemoteReset {
 public:
  // Frames that it takes of each neighbour.
  static int frames(const LlConfig& config) { return config.masks_lost_peers ? kRounds : 0; }

  // `ranks` are the links' neighbours, which `neighbour_of` has by rank. All outlive the object.
  LlRemoteReset(net::Links& links, const std::vector<int>& ranks,
                const std::vector<int>& neighbour_of, int first_frame);
  void bring_to(turn::HostReset& reset) { reset_ = &reset; }

  const std::vector<int>& ranks() const override { return ranks_; }
  void tell(int rank, std::size_t round, const turn::ResetRound& said) override;
  bool has_told(int rank) const override;

  bool owns(const net::Links::Chunk& chunk) const { return chunk.frame >= first_frame_; }
  void take_in(const net::Links::Chunk& chunk);
  // Sends what has had no free frame so far.
  void send();

 private:
  static constexpr int kRounds = std::tuple_size_v<decltype(turn::ResetCell::round)>;

  struct Round {
    turn::ResetRound said{};
    bool unsent = false;
  };
  unsigned frame_of(std::size_t round) const { return first_frame_ + static_cast<unsigned>(round); }

  net::Links& links_;
  const std::vector<int>& ranks_;
  const std::vector<int>& neighbour_of_;
  const unsigned first_frame_;
  turn::HostReset* reset_ = nullptr;
  std::vector<std::array<Round, kRounds>> rounds_;  // by neighbour
};

}  // namespace xd::ep::cpu
