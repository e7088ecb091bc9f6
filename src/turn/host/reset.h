// How the ranks of a sequence come back into step on the host, whatever each has done before.
//
//   area of rank r    written by    means
//   reset[src]        src           ResetCell, for each round
//
// A rank greets every peer with a number that it has never used, and answers each greeting by its
// number. A peer that has answered this greeting takes part in this reset, so what it has written
// before is of this reset as well; an old greeting or answer proves nothing. The numbers of a
// process that has taken another one's place begin where no other's have been.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <tuple>
#include <utility>

#include "base/rank_bits.h"
#include "comm/near_memory.h"
#include "turn/peer_masks.h"

namespace xd::turn {

inline constexpr int kResetNumbers = 2;
using ResetNumbers = std::array<std::uint64_t, kResetNumbers>;

struct ResetRound {
  std::uint64_t greeting;
  std::uint64_t answer;  // the peer's greeting that this rank has seen last in this round
  ResetNumbers numbers;  // written before the greeting
};
struct alignas(64) ResetCell {
  std::array<ResetRound, 2> round;
};

class HostReset {
 public:
  // reset[] lies at the offset `cells` in the memory that each near rank shares.
  HostReset(Comm& comm, PeerMasks& masks, NearTable areas, std::uint64_t cells)
      : comm_(comm),
        masks_(masks),
        areas_(std::move(areas)),
        cells_(cells),
        greeting_(comm.serial() << 32) {}

  // Returns when every peer that is not masked has called it, or has been lost: with the highest
  // numbers that any rank has given. `lost` gets the peers that have been lost meanwhile.
  ResetNumbers run(const HostWait& site, const ResetNumbers& own, RankBits& lost) {
    const RankBits masked = masks_.masked();
    ResetNumbers highest = own;
    ++greeting_;
    // A rank may leave out others than its peers do: the second round brings it the numbers of
    // ranks that its peers know of.
    for (round_ = 0; round_ < kRounds; ++round_) {
      // Each round has a deadline of its own: where a rank is missed in the first one, the others
      // come to the second one just when the first one's deadline has passed.
      HostWait wait = site;
      wait.deadline = masks_.deadline();
      exchange(wait, highest);
      for (const NearRank peer : comm_.hosts().peers()) {
        masks_.take_back(peer);
      }
    }
    for (const NearRank peer : comm_.hosts().peers()) {
      if (!masked.has(peer) && masks_.masked().has(peer)) lost.add(peer);
    }
    return highest;
  }

 private:
  NearMemory word(NearRank owner, int source, std::uint64_t offset) const {
    return areas_.of(owner).from(cells_ + at(source) * sizeof(ResetCell) +
                                 round_ * sizeof(ResetRound) + offset);
  }
  static constexpr std::size_t kRounds = std::tuple_size_v<decltype(ResetCell::round)>;
  static constexpr std::uint64_t kGreeting = offsetof(ResetRound, greeting);
  static constexpr std::uint64_t kAnswer = offsetof(ResetRound, answer);
  static std::uint64_t number_offset(std::size_t i) {
    return offsetof(ResetRound, numbers) + i * sizeof(std::uint64_t);
  }

  void greet(NearRank peer, const ResetNumbers& numbers) const {
    const int self = comm_.rank();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      word(peer, self, number_offset(i)).signal(numbers[i]);
    }
    word(peer, self, kGreeting).signal(greeting_);
    comm_.ring(peer);
  }
  // Answers greetings that have not been answered yet.
  void answer_peers() const {
    const NearRank self = comm_.hosts().self();
    for (const NearRank peer : comm_.hosts().peers()) {
      const std::uint64_t seen = word(self, peer, kGreeting).seen();
      const NearMemory answer = word(peer, self, kAnswer);
      if (seen == 0 || answer.seen() == seen || masks_.masked().has(peer)) continue;
      answer.signal(seen);
      comm_.ring(peer);
    }
  }
  void exchange(const HostWait& site, ResetNumbers& highest) {
    const NearRank self = comm_.hosts().self();
    const ResetNumbers own = highest;
    for (const NearRank peer : comm_.hosts().peers()) {
      if (!masks_.masked().has(peer)) greet(peer, own);
    }
    for (const NearRank peer : comm_.hosts().peers()) {
      if (masks_.masked().has(peer)) continue;
      const bool came = masks_.wait_in_reset(
          peer, site,
          [&] {
            answer_peers();
            return word(self, peer, kAnswer).seen() == greeting_;
          },
          [&] { return word(self, peer, kGreeting).seen(); });
      if (!came) continue;
      for (std::size_t i = 0; i < highest.size(); ++i) {
        highest[i] = std::max(highest[i], word(self, peer, number_offset(i)).seen());
      }
    }
    // A peer greets before it answers, so by now all greetings of this round are here.
    answer_peers();
  }

  Comm& comm_;
  PeerMasks& masks_;
  const NearTable areas_;
  const std::uint64_t cells_;
  std::uint64_t greeting_;
  std::size_t round_ = 0;
};

}  // namespace xd::turn
