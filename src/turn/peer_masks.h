// The peers that a rank goes on without, on the host. Each rank masks peers by itself, and neither
// sends to a masked peer nor waits for it.
//
//   area of rank r    written by    means
//   masked_by[src]    src           a Standing: what r is to src
//
// A rank that waits for a peer which has masked it would wait in vain, so it masks that peer as
// well. A peer that has unmasked it again is out of step with it until both have been in a reset.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <utility>

#include "base/deadline.h"
#include "base/rank_bits.h"
#include "comm/comm.h"
#include "comm/near_memory.h"

namespace xd::turn {

class PeerMasks {
 public:
  struct Rules {
    bool masks_lost_peers;  // false: the loss of a peer finishes the communicator
    int timeout_ms;         // of a wait; 0 = the communicator's
  };

  // masked_by[] lies at the offset `words` in the memory that each near rank shares.
  PeerMasks(Comm& comm, const Rules& rules, NearTable areas, std::uint64_t words)
      : comm_(comm), rules_(rules), areas_(std::move(areas)), words_(words) {}

  // The standing of a rank with another one.
  enum class Standing : std::uint64_t { in_step, masked, out_of_step };

  // The ranks that this rank has masked, and those that have masked it since it was last in step
  // with them. Any thread.
  RankBits masked() const { return {masked_[0].load(), masked_[1].load()}; }
  RankBits masked_by() const {
    RankBits ranks{};
    for (const NearRank peer : comm_.hosts().peers()) {
      if (standing_at(peer) != Standing::in_step) ranks.add(peer);
    }
    return ranks;
  }

  // False if the peer has masked this rank. If it is true, all that this rank has read before was
  // as the peer had left it for this rank: a peer stores that it masks a rank, and rings its bell,
  // before it stores over what that rank may read (and the bell's counter orders the two).
  bool still_in_step(NearRank peer) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return standing_at(peer) == Standing::in_step;
  }

  // Any thread, also while another one waits for the peer, which ends that wait.
  void mask(NearRank peer) {
    const std::lock_guard lock(changing_);
    if (!masked().has(peer)) set(peer, Standing::masked);
  }
  void unmask(NearRank peer) {
    const std::lock_guard lock(changing_);
    if (masked().has(peer)) set(peer, Standing::out_of_step);
  }
  // Called in a reset in which the peer takes part, unless it is masked.
  void take_back(NearRank peer) {
    const std::lock_guard lock(changing_);
    if (!masked().has(peer)) set(peer, Standing::in_step);
  }

  // The deadline of all waits of an operation, or of one half.
  Deadline deadline() const {
    return rules_.timeout_ms != 0 ? Deadline::after_ms(rules_.timeout_ms) : comm_.deadline();
  }
  // The deadline of waits for steps that a peer does behind waits of its own. Where ranks may be
  // masked there is time for one of those: a peer that is not late itself is not masked because it
  // waits for one that is.
  Deadline deadline_behind_waits() const {
    if (!rules_.masks_lost_peers) return deadline();
    const int each = timeout_ms() != 0 ? timeout_ms() : comm_.timeout_ms();
    return Deadline::after_ms(std::int64_t{2} * each);
  }
  int timeout_ms() const { return rules_.timeout_ms; }

  // Returns true when ready() holds, as Comm::wait_for does. Returns false where the peer was lost
  // and has been masked; a masked peer is not waited for.
  template <class Ready, class Seen>
  bool wait(NearRank peer, const HostWait& site, Ready&& ready, Seen&& seen) {
    return wait_unless(peer, site, ready, seen,
                       [&] { return standing_at(peer) != Standing::in_step; });
  }
  // The same in a reset, to which a peer may come that has been out of step, also one that is yet
  // to unmask this rank.
  template <class Ready, class Seen>
  bool wait_in_reset(NearRank peer, const HostWait& site, Ready&& ready, Seen&& seen) {
    return wait_unless(peer, site, ready, seen, [] { return false; });
  }

 private:
  template <class Ready, class Seen, class InVain>
  bool wait_unless(NearRank peer, const HostWait& site, Ready&& ready, Seen&& seen,
                   InVain&& in_vain) {
    if (!rules_.masks_lost_peers) {
      HostWait strict = site;
      strict.needs_first_ranks = true;
      comm_.wait_for(peer, strict, ready, seen);
      return true;
    }
    if (masked().has(peer)) return ready();
    comm_.wait(peer, site, [&] { return ready() || in_vain() || masked().has(peer); });
    // The peer's stores before it masked this rank are seen after that.
    if (ready()) return true;
    mask(peer);
    return false;
  }
  Standing standing_at(NearRank peer) const {
    return static_cast<Standing>(word(comm_.hosts().self(), peer).seen());
  }
  NearMemory word(NearRank owner, int source) const {
    return areas_.of(owner).from(words_ + at(source) * sizeof(std::uint64_t));
  }
  void set(NearRank peer, Standing standing) {
    RankBits ranks = masked();
    standing == Standing::masked ? ranks.add(peer) : ranks.remove(peer);
    for (std::size_t i = 0; i < masked_.size(); ++i) masked_[i].store(ranks.word[i]);
    word(peer, comm_.rank()).signal(static_cast<std::uint64_t>(standing));
    comm_.ring(peer);
    comm_.ring(comm_.hosts().self());  // for a thread of this rank that waits for the peer
  }

  Comm& comm_;
  const Rules rules_;
  const NearTable areas_;
  const std::uint64_t words_;
  std::mutex changing_;
  std::array<std::atomic<std::uint64_t>, 2> masked_{};
};

}  // namespace xd::turn
