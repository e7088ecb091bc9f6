// The peers that a rank goes on without, on the host. Each rank masks peers by itself, and neither
// sends to a masked peer nor waits for it.
//
//   area of rank r    written by    means
//   masked_by[src]    src           a Standing: what r is to src
//
// A rank that waits for a peer which has masked it would wait in vain, so it masks that peer as
// well. A peer that has unmasked it again is out of step with it until both have been in a reset.
//
// Of ranks on other machines it is messages that tell: see note_masked_by() and cut_off(), which
// the thread that takes them in calls, and take_back(). A message may overtake others, so whether a
// wait for such a rank is in vain is told of each operation apart.
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
#include "turn/goodbye.h"

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
  RankBits masked() const { return masked_.all(); }
  RankBits masked_by() const {
    RankBits ranks{};
    for (const NearRank peer : comm_.hosts().peers()) {
      if (standing_at(peer) != Standing::in_step) ranks.add(peer);
    }
    return ranks | masked_by_.all();
  }

  // False if the peer has masked this rank. If it is true, all that this rank has read before was
  // as the peer had left it for this rank: a peer stores that it masks a rank, and rings its bell,
  // before it stores over what that rank may read (and the bell's counter orders the two).
  bool still_in_step(int peer) const {
    std::atomic_thread_fence(std::memory_order_acquire);
    return standing_at(peer) == Standing::in_step;
  }

  // Any thread, also while another one waits for the peer, which ends that wait.
  void mask(int peer) {
    const std::lock_guard lock(changing_);
    if (!masked().has(peer)) set(peer, Standing::masked);
  }
  void unmask(int peer) {
    const std::lock_guard lock(changing_);
    if (masked().has(peer)) set(peer, Standing::out_of_step);
  }
  // Called in a reset in which the peer takes part, unless it is masked.
  void take_back(int peer) {
    const std::lock_guard lock(changing_);
    if (masked().has(peer)) return;
    masked_by_.remove(peer);
    left_out_.remove(peer);
    set(peer, Standing::in_step);
  }

  // A remote rank has told that it leaves this rank out, or does not keep step with it.
  void note_masked_by(int remote_rank) { masked_by_.add(remote_rank); }
  // The ranks that this one has masked since it was last in step with them, for messages to tell.
  RankBits left_out() const { return left_out_.all(); }
  // Nothing comes from a remote rank any more, nor goes there.
  void cut_off(int remote_rank) { cut_off_.add(remote_rank); }
  bool is_cut_off(int remote_rank) const { return cut_off_.all().has(remote_rank); }
  // It has been cut off, or has ended without a goodbye.
  bool is_gone(int remote_rank) const {
    const Errors& errors = comm_.errors();
    return is_cut_off(remote_rank) || (errors.lost(remote_rank) && !errors.left(remote_rank));
  }
  // It is left out, or leaves this rank out.
  bool is_out_of_step(int peer) const { return masked().has(peer) || !still_in_step(peer); }

  // The deadline of all waits of an operation, or of one half.
  Deadline deadline() const { return Deadline::after_ms(wait_ms()); }
  // The deadline of waits for steps that a peer does behind waits of its own. Where ranks may be
  // masked there is time for one of those: a peer that is not late itself is not masked because it
  // waits for one that is.
  Deadline deadline_behind_waits() const {
    if (!rules_.masks_lost_peers) return deadline();
    return Deadline::after_ms(std::int64_t{2} * wait_ms());
  }
  // The deadline of waits that are for others alone: well before those of others' own waits.
  Deadline patience() const { return Deadline::after_ms(wait_ms() / 4); }
  int timeout_ms() const { return rules_.timeout_ms; }
  bool masks_lost_peers() const { return rules_.masks_lost_peers; }

  // Returns true when ready() holds, as Comm::wait_for does. Returns false where the peer was lost
  // and has been masked; a masked peer is not waited for.
  template <class Ready, class Seen>
  bool wait(int peer, const HostWait& site, Ready&& ready, Seen&& seen) {
    return wait_unless(peer, site, ready, seen,
                       [&] { return standing_at(peer) != Standing::in_step; });
  }
  // The same where in_vain() tells that the peer leaves this rank out.
  template <class Ready, class Seen, class InVain>
  bool wait_unless(int peer, const HostWait& site, Ready&& ready, Seen&& seen, InVain&& in_vain) {
    if (!rules_.masks_lost_peers) {
      HostWait strict = site;
      strict.needs_first_ranks = true;
      comm_.wait_for(peer, strict, ready, seen);
      return true;
    }
    if (masked().has(peer)) return ready();
    const bool near = comm_.hosts().is_near(peer);
    Goodbye goodbye(comm_, peer);
    const auto is_lost = [&] { return !near && (is_gone(peer) || goodbye.is_over()); };
    comm_.wait(near ? peer : comm_.rank(), site,
               [&] { return ready() || in_vain() || masked().has(peer) || is_lost(); });
    // The peer's stores before it masked this rank are seen after that.
    if (ready()) return true;
    mask(peer);
    return false;
  }
  // The same in a reset, to which a peer may come that has been out of step, also one that is yet
  // to unmask this rank.
  template <class Ready, class Seen>
  bool wait_in_reset(int peer, const HostWait& site, Ready&& ready, Seen&& seen) {
    return wait_unless(peer, site, ready, seen, [] { return false; });
  }

 private:
  // Any thread. Nobody reads anything else because of a rank that is in it, so no order is needed
  // beyond the one that begin() of HostPipeline makes.
  class Ranks {
   public:
    RankBits all() const { return {word_[0].load(), word_[1].load()}; }
    void add(int rank) { word_[at(rank) / 64].fetch_or(bit(rank)); }
    void remove(int rank) { word_[at(rank) / 64].fetch_and(~bit(rank)); }

   private:
    static std::uint64_t bit(int rank) { return std::uint64_t{1} << rank % 64; }
    std::array<std::atomic<std::uint64_t>, 2> word_{};
  };

  int wait_ms() const { return timeout_ms() != 0 ? timeout_ms() : comm_.timeout_ms(); }
  Standing standing_at(int peer) const {
    if (const auto near = comm_.hosts().find_near(peer))
      return static_cast<Standing>(word(comm_.hosts().self(), *near).seen());
    return masked_by_.all().has(peer) || is_cut_off(peer) ? Standing::masked : Standing::in_step;
  }
  NearMemory word(NearRank owner, int source) const {
    return areas_.of(owner).from(words_ + at(source) * sizeof(std::uint64_t));
  }
  void set(int peer, Standing standing) {
    standing == Standing::masked ? masked_.add(peer) : masked_.remove(peer);
    if (standing == Standing::masked) left_out_.add(peer);
    if (const auto near = comm_.hosts().find_near(peer)) {
      word(*near, comm_.rank()).signal(static_cast<std::uint64_t>(standing));
      comm_.ring(*near);
    }
    comm_.ring(comm_.hosts().self());  // for a thread of this rank that waits for the peer
  }

  Comm& comm_;
  const Rules rules_;
  const NearTable areas_;
  const std::uint64_t words_;
  std::mutex changing_;
  Ranks masked_, left_out_, masked_by_, cut_off_;
};

}  // namespace xd::turn
