// How the ranks of a sequence come back into step on the host, whatever each has done before.
//
//   area of rank r    written by    means
//   reset[src]        src           ResetCell, for each round
//
// Ranks on other machines send one another what they would write (RemoteReset).
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
#include <vector>

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

// The needs of a reset that has ranks on other machines.
class RemoteReset {
 public:
  virtual const std::vector<int>& ranks() const = 0;  // all remote ranks
  // Sends the rank what this one says in a round. It comes behind what was sent before, of which
  // only the last may come.
  virtual void tell(int rank, std::size_t round, const ResetRound& said) = 0;
  // Whether that comes to the rank also if this one does nothing more.
  virtual bool has_told(int rank) const = 0;

 protected:
  ~RemoteReset() = default;
};

class HostReset {
 public:
  // reset[] lies at the offset `cells` in the memory that each near rank shares.
  HostReset(Comm& comm, PeerMasks& masks, NearTable areas, std::uint64_t cells)
      : comm_(comm),
        masks_(masks),
        areas_(std::move(areas)),
        cells_(cells),
        greeting_(comm.serial() << 32),
        others_(comm.hosts().peers().begin(), comm.hosts().peers().end()) {}

  // From now on ranks on other machines take part as well. `remote` outlives the reset.
  void reach(RemoteReset& remote) {
    remote_ = &remote;
    others_.insert(others_.end(), remote.ranks().begin(), remote.ranks().end());
    said_.resize(at(comm_.num_ranks()));
  }
  // Takes in what a remote rank has said, which its message has brought. The thread of run() calls
  // it, and nobody else looks into this cell.
  void bring(int source, std::size_t round, const ResetRound& said) const {
    const NearMemory cell =
        areas_.of(comm_.hosts().self())
            .from(cells_ + at(source) * sizeof(ResetCell) + round * sizeof(ResetRound));
    *cell.array<ResetRound>() = said;
  }

  // Returns when every peer that is not masked has called it, or has been lost: with the highest
  // numbers that any rank has given. `lost` gets the peers that have been lost meanwhile.
  ResetNumbers run(const HostWait& site, const ResetNumbers& own, RankBits& lost) {
    const RankBits masked = masks_.masked();
    ResetNumbers highest = own;
    ++greeting_;
    // A rank may leave out others than its peers do: the second round brings it the numbers of
    // ranks that its peers know of.
    for (round_ = 0; round_ < kRounds; ++round_) {
      // Each round has a deadline of its own, and the second one has time for a peer that has
      // missed a rank in the first one.
      HostWait wait = site;
      wait.deadline = round_ == 0 ? masks_.deadline() : masks_.deadline_behind_waits();
      const RankBits answered = exchange(wait, highest);
      for (const int peer : others_)
        if (answered.has(peer)) masks_.take_back(peer);
    }
    rest(site);
    for (const int peer : others_) {
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

  void greet_remote(int peer, const ResetNumbers& numbers) {
    ResetRound& said = said_[at(peer)].round[round_];
    said = {.greeting = greeting_, .answer = said.answer, .numbers = numbers};
    remote_->tell(peer, round_, said);
  }
  void greet(int rank, const ResetNumbers& numbers) {
    const auto near = comm_.hosts().find_near(rank);
    if (!near) return greet_remote(rank, numbers);
    const NearRank peer = *near;
    const int self = comm_.rank();
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      word(peer, self, number_offset(i)).signal(numbers[i]);
    }
    word(peer, self, kGreeting).signal(greeting_);
    comm_.ring(peer);
  }
  // Answers greetings that have not been answered yet.
  void answer_peers() {
    const NearRank self = comm_.hosts().self();
    for (const NearRank peer : comm_.hosts().peers()) {
      const std::uint64_t seen = word(self, peer, kGreeting).seen();
      const NearMemory answer = word(peer, self, kAnswer);
      if (seen == 0 || answer.seen() == seen || masks_.masked().has(peer)) continue;
      answer.signal(seen);
      comm_.ring(peer);
    }
    if (remote_ != nullptr) answer_remote_peers();
  }
  void answer_remote_peers() {
    for (const int peer : remote_->ranks()) {
      const std::uint64_t seen = word(comm_.hosts().self(), peer, kGreeting).seen();
      ResetRound& said = said_[at(peer)].round[round_];
      if (seen == 0 || said.answer == seen || masks_.masked().has(peer)) continue;
      said.answer = seen;
      remote_->tell(peer, round_, said);
    }
  }
  // Returns when all that this rank has said comes to the ranks on other machines, or soon.
  void rest(HostWait site) const {
    if (remote_ == nullptr) return;
    site.deadline = masks_.patience();
    for (const int peer : remote_->ranks()) {
      comm_.wait(comm_.rank(), site, [&] {
        return remote_->has_told(peer) || masks_.masked().has(peer) || masks_.is_gone(peer);
      });
    }
  }
  // Returns the peers that have answered.
  RankBits exchange(const HostWait& site, ResetNumbers& highest) {
    RankBits answered{};
    const NearRank self = comm_.hosts().self();
    const ResetNumbers own = highest;
    for (const int peer : others_) {
      if (!masks_.masked().has(peer)) greet(peer, own);
    }
    for (const int peer : others_) {
      if (masks_.masked().has(peer)) continue;
      const bool came = masks_.wait_in_reset(
          peer, site,
          [&] {
            answer_peers();
            return word(self, peer, kAnswer).seen() == greeting_;
          },
          [&] { return word(self, peer, kGreeting).seen(); });
      if (!came) continue;
      answered.add(peer);
      for (std::size_t i = 0; i < highest.size(); ++i) {
        highest[i] = std::max(highest[i], word(self, peer, number_offset(i)).seen());
      }
    }
    // A peer greets before it answers, so by now all greetings of this round are here.
    answer_peers();
    return answered;
  }

  Comm& comm_;
  PeerMasks& masks_;
  const NearTable areas_;
  const std::uint64_t cells_;
  std::uint64_t greeting_;
  std::size_t round_ = 0;
  std::vector<int> others_;        // all ranks but this one, near ones first
  std::vector<ResetCell> said_;    // by rank: to remote ones
  RemoteReset* remote_ = nullptr;  // none: all ranks are near
};

}  // namespace xd::turn
