// A pipeline on the host: turns whose halves are calls of their own, so that several operations may
// be under way at once. turn/entry.h has the verbs; docs/internals/turns.md says why no wait goes
// in a circle.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <utility>
#include <vector>

#include "base/math.h"
#include "base/rank_bits.h"
#include "observe/subject.h"
#include "turn/goodbye.h"
#include "turn/host/cells.h"
#include "turn/host/remote_pipeline.h"
#include "turn/peer_masks.h"

namespace xd::turn {

template <class Record>
class HostPipeline : public HostCells<Record> {
 public:
  using HostCells<Record>::peers, HostCells<Record>::ring_peers;

  struct Place {
    const TurnMap& map;
    NearTable areas;
    std::uint64_t stages;
  };
  // `operation` is what its turns are, for error texts.
  HostPipeline(Comm& comm, int number, const Place& place, std::int32_t operation, PeerMasks& masks)
      : HostCells<Record>(comm, number, place.map, place.areas, place.stages),
        operation_(operation),
        masks_(masks),
        records_(at(comm.num_ranks())),
        held_(place.stages),
        others_(this->peers().begin(), this->peers().end()) {}

  // From now on ranks on other machines take part as well. `remote` outlives the pipeline.
  void reach(RemotePipeline& remote) {
    remote_ = &remote;
    others_.insert(others_.end(), remote.ranks().begin(), remote.ranks().end());
  }

  // Operations are numbered from 1. Counts of those that have been sent here, and of those that
  // have been taken.
  std::uint64_t sent() const { return sent_; }
  std::uint64_t taken() const { return taken_; }
  std::uint64_t between_halves() const { return sent_ - taken_; }
  bool full() const { return between_halves() == this->stages(); }
  // True if this rank has done what a peer waits for in that phase of an operation.
  bool has_come(xd_phase phase, std::uint64_t epoch) const {
    if (phase == XD_PHASE_CREDIT) return taken_ + this->stages() >= epoch;
    // Of messages that have been sent nobody knows here when they are taken in.
    return phase == XD_PHASE_DONE || sent_ >= epoch;
  }
  // True if the peer's wait ends when this rank's next call fails.
  bool can_join(xd_phase phase, std::uint64_t epoch) const {
    return phase != XD_PHASE_CREDIT && phase != XD_PHASE_DONE && sent_ + 1 == epoch && !full();
  }

  // ---- The send half: begin, enter ----

  // Begins the operation sent(). Returns when every peer has taken the operation whose stage it
  // uses again: from here on this rank may write into that stage of their memory. The pipeline is
  // not full.
  void begin();
  // Tells near ranks, and remote ones that are not of the company. The family sends the other
  // remote ones their messages, which have the record.
  void enter(const Record& record);
  const Record& sent_record() const { return held(sent_).own; }
  // The peers that take part in the operation sent(): those that were not masked when it began, and
  // have not been lost since.
  const RankBits& company() const { return held(sent_).company; }

  // ---- The receive half: await, leave ----

  // The operation taken() + 1, which has been sent: its record here.
  std::uint64_t next() const { return taken_ + 1; }
  const Record& own_record() const { return held(next()).own; }
  const RankBits& awaited() const { return held(next()).company; }
  // Returns when every peer of its company has entered it, or has been lost.
  void await(observe::WaitTimes& times);
  // Returns when all messages of remote ranks of its company have come, which those wait for: see
  // rest(). Where ranks may be masked, it waits for a part of the time of a wait, and masks none.
  void await_remote();
  // The ranks whose records have come, this one among them, and the records by rank.
  const RankBits& here() const { return here_; }
  const std::vector<Record>& records() const { return records_; }
  // The entry of a remote rank, which its message has brought.
  void bring_entry(int source, std::uint64_t epoch, const Record& record) const {
    this->post_entry_of(source, this->self(), epoch, record);
  }
  // Gives up a rank of here() whose share of the operation does not come.
  void lose(int rank) { here_.remove(rank); }
  // The peers that were to take part and have been lost.
  RankBits lost() const;
  // Tells every peer that this rank has taken the operation: they may use its stage here again.
  // Waits for nobody.
  void leave();
  // Returns when this rank's messages of the operation reach remote ranks whatever it does next, or
  // whether it does anything. Not so its credits, which may come with its next call, nor what it
  // sends to ranks whose own call has failed: they need it no more, and may be in no call that
  // takes it in. Where ranks may be masked, it waits as await_remote() does.
  void rest(std::uint64_t epoch);
  // Takes the operation sent() as soon as those before it have been taken, without its rows.
  void drop_sent() {
    held(sent_).dropped = true;
    take_dropped();
  }

  // Counts on behind all that a process before this one has done in this rank's place, which may
  // have been under way in each stage.
  void take_over() { sent_ = taken_ = this->highest_left() + this->stages(); }

  // Forgets what is between its halves, and counts on from `epoch`, which no rank has passed.
  void restart(std::uint64_t epoch);

  // ---- For what a family makes its ranks wait for inside an operation ----

  HostWait site(xd_phase phase, std::uint64_t epoch) const {
    return {.phase = phase,
            .group = this->number(),
            .operation = operation_,
            .epoch = epoch,
            .deadline = deadline_,
            .timeout_ms = masks_.timeout_ms(),
            .progress = remote_ != nullptr ? &remote_->progress() : nullptr};
  }
  bool has_entered(int peer, std::uint64_t epoch) const {
    return this->entered(peer, epoch) == epoch;
  }
  const Record& record_of(int peer, std::uint64_t epoch) const {
    return this->posted_by(peer, epoch);
  }
  // Waits for something that a remote rank brings in the operation; false where it has been lost.
  template <class Ready>
  bool wait_for_message(int remote_rank, std::uint64_t epoch, Ready&& ready) {
    return wait(remote_rank, site(XD_PHASE_ROWS, epoch), ready, [&] { return epoch - 1; });
  }
  // Whether the operation `epoch` takes what a remote rank sends to it. Of one that this rank has
  // not begun that is not known for certain yet.
  bool expects(int remote_rank, std::uint64_t epoch) const {
    if (epoch <= taken_ || epoch > taken_ + this->stages()) return false;
    if (epoch <= sent_) return held(epoch).at_start.has(remote_rank);
    return !masks_.masked().has(remote_rank);
  }
  // True when the rank has entered the operation, false where it has been lost.
  bool wait_entered(int rank, std::uint64_t epoch) {
    return wait(
        rank, site(XD_PHASE_ENTRY, epoch), [&] { return is_here(rank, epoch); },
        [&] { return this->entered(rank, epoch); });
  }

 private:
  // The facts that are kept of an operation between its halves.
  struct Held {
    Record own{};
    RankBits company{};   // the peers that are sent to
    RankBits at_start{};  // the peers that were not masked when it began
    bool dropped = false;
  };
  // Waits for a near or a remote rank; false where it has been lost.
  template <class Ready, class Seen>
  bool wait(int rank, const HostWait& site, Ready&& ready, Seen&& seen) {
    if (this->comm().hosts().is_near(rank)) return masks_.wait(rank, site, ready, seen);
    if (masks_.masks_lost_peers()) {
      return masks_.wait_unless(rank, site, ready, seen,
                                [&] { return remote_->leaves_out(rank, site.epoch); });
    }
    wait_remote(rank, site, ready, seen);
    return true;
  }
  // Where losses are fatal.
  template <class Ready, class Seen>
  void wait_remote(int rank, const HostWait& site, Ready&& ready, Seen&& seen);
  // Waits for remote ranks that need this one, where ranks may be masked. Its end is not theirs: a
  // rank that lets others wait here must not make this one late for them. A rank that is out of
  // step gets a moment, unless it has just been waited for.
  class Courtesy {
   public:
    explicit Courtesy(HostPipeline& pipeline)
        : pipeline_(pipeline), patience_(pipeline.masks_.patience()) {}
    template <class Ready>
    void wait(int rank, HostWait site, Ready&& ready) const {
      const PeerMasks& masks = pipeline_.masks_;
      const auto is_over = [&] {
        const bool was_late = pipeline_.late_.has(rank);
        return masks.is_gone(rank) ||
               (masks.is_out_of_step(rank) && (was_late || moment_.passed()));
      };
      site.deadline = patience_;
      pipeline_.comm().wait(pipeline_.self(), site, [&] { return ready() || is_over(); });
    }

   private:
    static constexpr int kMomentMs = 100;
    HostPipeline& pipeline_;
    const Deadline patience_, moment_ = Deadline::after_ms(kMomentMs);
  };
  template <class Ready, class Seen>
  bool wait_while_here(int rank, HostWait site, Ready&& ready, Seen&& seen);
  Held& held(std::uint64_t epoch) { return held_[stage_of(epoch, this->stages())]; }
  const Held& held(std::uint64_t epoch) const { return held_[stage_of(epoch, this->stages())]; }
  void take_dropped() {
    while (taken_ < sent_ && held(next()).dropped) leave_one();
  }
  void leave_one();
  // Of a remote rank its message is here as well.
  bool is_here(int rank, std::uint64_t epoch) const {
    const bool near = this->comm().hosts().is_near(rank);
    return has_entered(rank, epoch) && (near || remote_->holds(rank, epoch));
  }
  // True if the rank has told that its call has failed.
  bool has_failed(int rank, std::uint64_t epoch) const {
    return has_entered(rank, epoch) && record_of(rank, epoch).call.status != XD_SUCCESS;
  }

  const std::int32_t operation_;
  PeerMasks& masks_;
  std::vector<Record> records_;
  std::vector<Held> held_;                            // by stage
  RankBits here_{}, late_{};                          // late_: await() has waited for them in vain
  Deadline deadline_{Deadline::Clock::time_point{}};  // of the half under way
  std::uint64_t sent_ = 0, taken_ = 0;
  std::uint64_t restarted_at_ =
      UINT64_MAX - 1;                 // the last operation before a reset, if there was one
  std::vector<int> others_;           // all ranks but this one, near ones first
  RemotePipeline* remote_ = nullptr;  // none: all ranks are near
};

template <class Record>
void HostPipeline<Record>::begin() {
  ++sent_;
  deadline_ = masks_.deadline_behind_waits();
  Held& op = held(sent_);
  op = {};
  const RankBits masked = masks_.masked();
  std::atomic_thread_fence(std::memory_order_seq_cst);  // see leave_one()
  const std::uint64_t before = sent_ > this->stages() ? sent_ - this->stages() : 0;
  for (const int peer : others_)
    if (!masked.has(peer)) op.at_start.add(peer);
  for (const NearRank peer : peers()) {
    if (masked.has(peer)) continue;
    // A peer may have taken this very operation already, where its own send half has failed.
    const bool free = masks_.wait(
        peer, site(XD_PHASE_CREDIT, sent_), [&] { return this->done_by(peer, sent_) >= before; },
        [&] { return this->done_by(peer, sent_); });
    if (free) op.company.add(peer);
  }
  if (remote_ != nullptr) {
    for (const int rank : remote_->ranks()) {
      if (masked.has(rank)) continue;
      const bool free = wait(
          rank, site(XD_PHASE_CREDIT, sent_), [&] { return remote_->has_place(rank, sent_); },
          [&] { return sent_ - this->stages() - 1; });
      if (free) op.company.add(rank);
    }
  }
  deadline_ = masks_.deadline();
}

template <class Record>
void HostPipeline<Record>::enter(const Record& record) {
  held(sent_).own = record;
  for (const NearRank peer : peers()) {
    if (company().has(peer)) this->post_entry(peer, sent_, record);
  }
  if (remote_ == nullptr) return;
  for (const int rank : remote_->ranks())
    if (!company().has(rank)) remote_->tell_outsider(rank);
}

template <class Record>
void HostPipeline<Record>::await(observe::WaitTimes& times) {
  const auto has_come = [this](int peer) { return is_here(peer, next()); };
  const observe::Span span(times.subject(), "wait for entries");
  // Peers may come out of a reset by a timeout later than this rank.
  const bool first = next() == restarted_at_ + 1;
  deadline_ = first ? masks_.deadline_behind_waits() : masks_.deadline();
  // The share of a rank that has been masked meanwhile counts if it has come.
  if (remote_ != nullptr && masks_.masks_lost_peers()) remote_->progress().poll();
  here_ = late_ = {};
  here_.add(this->self());
  records_[at(this->self())] = own_record();
  for (const int peer : others_) {
    if (!awaited().has(peer)) continue;
    const bool came = wait(
        peer, site(XD_PHASE_ENTRY, next()),
        [&] {
          const bool here = has_come(peer);
          times.look(peer, here, others_, has_come);
          return here;
        },
        [&] { return this->entered(peer, next()); });
    if (!came) {
      if (deadline_.passed()) late_.add(peer);
      continue;
    }
    here_.add(peer);
    records_[at(peer)] = record_of(peer, next());
  }
  // Peers may send what comes behind their entries behind waits for those of others.
  if (masks_.masks_lost_peers()) deadline_ = masks_.deadline_behind_waits();
}

template <class Record>
void HostPipeline<Record>::await_remote() {
  if (remote_ == nullptr) return;
  deadline_ = masks_.deadline();
  const Courtesy courtesy(*this);
  for (const int rank : remote_->ranks()) {
    if (!awaited().has(rank)) continue;
    if (!masks_.masks_lost_peers()) {
      wait_entered(rank, next());
    } else {
      courtesy.wait(rank, site(XD_PHASE_ENTRY, next()), [&] { return is_here(rank, next()); });
    }
  }
}

template <class Record>
RankBits HostPipeline<Record>::lost() const {
  RankBits ranks{};
  for (const int peer : others_) {
    if (held(next()).at_start.has(peer) && !here_.has(peer)) ranks.add(peer);
  }
  return ranks;
}

// A peer that waits for this credit has entered every operation before the one that it begins. Only
// such a peer is woken, as the others sleep for something else. The fences here and in begin() make
// sure that this rank sees the peer's last entry, or the peer this credit.
template <class Record>
void HostPipeline<Record>::leave_one() {
  ++taken_;
  const RankBits& company = held(taken_).company;
  for (const NearRank peer : peers()) {
    if (company.has(peer)) this->post_done(peer, taken_);
  }
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const std::uint64_t last = taken_ + this->stages() - 1;
  for (const NearRank peer : peers()) {
    if (company.has(peer) && this->entered(peer, last) >= last) this->comm().ring(peer);
  }
  if (remote_ != nullptr) remote_->leave(taken_);
}

// False = the rank has left, and the time for its last words is over.
template <class Record>
template <class Ready, class Seen>
bool HostPipeline<Record>::wait_while_here(int rank, HostWait site, Ready&& ready, Seen&& seen) {
  site.needs_all_ranks = true;
  Goodbye goodbye(this->comm(), rank);
  this->comm().wait_for(
      this->self(), site, [&] { return ready() || goodbye.is_over(); }, seen,
      [rank] { return rank; });
  return ready();
}

template <class Record>
template <class Ready, class Seen>
void HostPipeline<Record>::wait_remote(int rank, const HostWait& site, Ready&& ready, Seen&& seen) {
  if (!wait_while_here(rank, site, ready, seen)) this->comm().throw_lost(rank, site);
}

template <class Record>
void HostPipeline<Record>::rest(std::uint64_t epoch) {
  if (remote_ == nullptr) return;
  deadline_ = masks_.deadline();
  const HostWait site = this->site(XD_PHASE_DONE, epoch);
  const Courtesy courtesy(*this);
  for (const int rank : remote_->ranks()) {
    const auto ready = [&] { return remote_->has_sent(rank, epoch) || has_failed(rank, epoch); };
    if (!masks_.masks_lost_peers()) {  // a rank that has left needs nothing any more
      wait_while_here(rank, site, ready, [&] { return epoch - 1; });
    } else if (held(epoch).company.has(rank)) {
      courtesy.wait(rank, site, ready);
    } else {
      courtesy.wait(rank, site, [&] { return !remote_->is_telling(rank, epoch); });
    }
  }
}

template <class Record>
void HostPipeline<Record>::restart(std::uint64_t epoch) {
  sent_ = taken_ = restarted_at_ = epoch;
  for (const NearRank peer : peers()) {
    if (!masks_.masked().has(peer)) this->post_done_all(peer, epoch);
  }
  ring_peers();
  if (remote_ != nullptr) remote_->restart(epoch);
}

template <class Record>
void HostPipeline<Record>::leave() {
  leave_one();
  take_dropped();
}

}  // namespace xd::turn
