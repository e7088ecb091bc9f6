// Turns on the host: the five verbs of turn/entry.h, for operations that run on the caller's
// thread.
//
// Losses. A sequence may outlive the end of ranks. The operation in which one is missed is *broken*
// on all ranks that are left: it ends there with the loss. So does each further one at once, until
// the sequence enters a view, and goes on without the rank.
//
// The ranks agree about what is broken without a message, since a rank that has ended stores
// nothing any more, and its words stay mapped, in whoever's memory they are. A rank leaves its done
// flags behind all that others need of it in an operation. So the operation lacks nothing of a rank
// that has left one of them anywhere; and where it has left none, no rank has its flag, so none can
// have ended the operation well. Views are entered in the same way, by the words below.
//
// A rank that breaks an operation says so in its own done flags, and returns when no rank touches
// its memory any more. A rank that has yet to enter will find that flag behind its entry, and moves
// nothing: each stores its own word before it loads the other's.
//
//   area of rank r  written by           means
//   view[src]       src, once per view   ViewCell: src has come to enter that view
#pragma once

#include <algorithm>
#include <atomic>
#include <climits>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include "base/math.h"
#include "comm/views/view.h"
#include "observe/subject.h"
#include "turn/host/cells.h"
#include "turn/host/course.h"
#include "turn/host/remote_turn.h"

namespace xd::turn {

template <class Record>
class HostTurn : public HostCells<Record> {
 public:
  using HostCells<Record>::peers, HostCells<Record>::ring_peers;

  // As for HostCells. `subject` is told of waits for the peers' entries.
  HostTurn(Comm& comm, int number, const TurnMap& map, NearTable areas, observe::Subject& subject)
      : HostCells<Record>(comm, number, map, areas, kStages),
        areas_(std::move(areas)),
        subject_(subject),
        records_(at(comm.num_ranks())),
        takes_part_(at(comm.num_ranks()), true),
        course_(
            comm, number, -1, subject,
            [this](xd_phase, std::uint64_t epoch) { return epoch_ >= epoch; },
            [this](xd_phase, std::uint64_t epoch) { return epoch_ + 1 == epoch; }) {
    subject.counters().measures_waits.set(1);
  }

  // From now on ranks on other machines take part as well. Outlives the turns.
  void reach(RemoteTurn<Record>& remote) { remote_ = &remote; }
  bool reaches_remote() const { return remote_ != nullptr; }

  void begin(std::int32_t operation) {
    operation_ = operation;
    ++epoch_;
  }
  void enter(const Record& record);
  void await();
  void leave();
  void end();

  std::uint64_t epoch() const { return epoch_; }
  // The records of all ranks that take part, after await(); this rank's own, after enter().
  std::span<const Record> records() const { return records_; }
  const Record& record_of(int rank) const { return records_[at(rank)]; }
  bool takes_part(int rank) const { return takes_part_[at(rank)]; }

  // ---- Losses, of sequences whose ranks are all near ----

  // From now on the sequence outlives them. view[] lies at this offset in the memory that each rank
  // shares.
  void outlive_losses(std::uint64_t views) {
    views_ = views;
    outlives_ = true;
  }
  // An operation is broken, and all that follow are. Known at the latest behind end().
  bool is_broken() const { return is_broken_; }
  // The rank by whose loss it is broken, behind end() or enter_view().
  int broken_by() const { return broken_by_; }
  // Goes on with those ranks that take part and are members, when all of them have called it; all
  // others have ended by then. False where one of them has been lost meanwhile: the sequence is
  // broken by it. A member for which all words are there enters all the same: the others come to
  // none of its operations, and the first one is broken.
  bool enter_view(std::int32_t operation, const View& view);

  // ---- For what a family makes its ranks wait for inside an operation ----

  HostWait site(xd_phase phase) const {
    return {.phase = phase,
            .group = this->number(),
            .operation = operation_,
            .epoch = epoch_,
            .deadline = this->comm().deadline(),
            .needs_all_ranks = !outlives_,
            .progress = remote_};
  }
  // As Comm::wait_for(). False = the operation is broken.
  template <class Ready, class Seen, class Late>
  bool wait_for(int peer, const HostWait& site, Ready&& ready, Seen&& seen, Late&& late) {
    if (!outlives_) {
      this->comm().wait_for(peer, site, ready, seen, late);
      return true;
    }
    bool is_ready = false;
    wait_through_losses(
        site,
        [&] {
          is_ready = ready();
          return is_ready || look_for_losses();
        },
        seen, late);
    return is_ready;
  }
  // The last operation that a peer has entered, for error texts, out of those that the stages can
  // hold.
  std::uint64_t last_entered(int peer) const {
    return std::max(this->entered(peer, epoch_), this->entered(peer, epoch_ - 1));
  }

 private:
  // Waits for the entries of these ranks.
  template <class Ranks>
  void await_from(const Ranks& ranks, observe::WaitTimes& times);
  bool has_entered(int peer) const { return this->entered(peer, epoch_) == epoch_; }

  // A wait that no loss ends by itself: that of the rank itself never comes.
  template <class Ready, class Seen, class Late>
  void wait_through_losses(const HostWait& site, Ready&& ready, Seen&& seen, Late&& late) {
    this->comm().wait_for(this->self(), site, ready, seen, late);
  }
  bool look_for_losses();
  bool some_peer_broke() const {
    return std::ranges::any_of(
        peers(), [&](NearRank peer) { return this->done_by(peer, epoch_) == (epoch_ | kBroken); });
  }
  // The rank of which the operation lacks something, as it has ended; -1 = none.
  int missed() const {
    for (const NearRank peer : peers()) {
      if (this->comm().has_ended(peer) && !this->has_left(peer, epoch_, kBroken)) return peer;
    }
    return -1;
  }
  void end_through_losses(const HostWait& site);

  NearMemory view_cell(NearRank owner, int source) const {
    return areas_.of(owner).from(views_ + at(source) * sizeof(ViewCell));
  }
  // The epoch of a rank that has come to enter the view; none where it has not.
  std::optional<std::uint64_t> came_to_view(NearRank source, std::uint64_t number) const;
  template <class Ready>
  bool comes_to_view(NearRank peer, const NearRanks& members, Ready&& ready);
  void tell_of_view(const NearRanks& members, std::uint64_t number) const;

  const NearTable areas_;
  observe::Subject& subject_;
  std::vector<Record> records_;  // records of the current operation
  std::vector<bool> takes_part_;
  std::int32_t operation_ = 0;
  std::uint64_t epoch_ = 0;
  RemoteTurn<Record>* remote_ = nullptr;  // none: all ranks are near
  bool outlives_ = false, is_broken_ = false;
  int broken_by_ = -1;
  std::uint64_t views_ = 0;
  HostCourse course_;
};

template <class Record>
void HostTurn<Record>::enter(const Record& record) {
  records_[at(this->self())] = record;
  for (const NearRank peer : peers()) this->post_entry(peer, epoch_, record);
  ring_peers();
  if (remote_ != nullptr) remote_->enter(record);
}

template <class Record>
void HostTurn<Record>::await() {
  observe::WaitTimes times(subject_);
  await_from(peers(), times);
  if (remote_ != nullptr) await_from(remote_->ranks(), times);
  if (!outlives_ || is_broken_) return;
  // Behind this rank's entries: see above.
  std::atomic_thread_fence(std::memory_order_seq_cst);
  is_broken_ = some_peer_broke();
}

template <class Record>
template <class Ranks>
void HostTurn<Record>::await_from(const Ranks& ranks, observe::WaitTimes& times) {
  const HostWait site = this->site(XD_PHASE_ENTRY);
  const auto has_entered = [this](int peer) { return this->has_entered(peer); };
  // Of ranks in two different calls, the lowest of all and the lowest in the other call wait for
  // one another then.
  const auto lowest_missing = [&] {
    for (int r = 0; r < this->comm().num_ranks(); ++r) {
      if (r != this->self() && takes_part(r) && !has_entered(r)) return r;
    }
    return -1;
  };
  for (const auto& rank : ranks) {
    const int peer = rank;
    const bool came = wait_for(
        peer, site,
        [&] {
          const bool here = has_entered(peer);
          times.look(peer, here, ranks, has_entered);
          return here;
        },
        [&] { return last_entered(peer); }, lowest_missing);
    if (!came) return;
    records_[at(peer)] = this->posted_by(peer, epoch_);
  }
}

template <class Record>
void HostTurn<Record>::leave() {
  for (const NearRank peer : peers()) this->post_done(peer, is_broken_ ? epoch_ | kBroken : epoch_);
  ring_peers();
  // In front of the look at who has entered: see above.
  if (is_broken_) std::atomic_thread_fence(std::memory_order_seq_cst);
}

template <class Record>
void HostTurn<Record>::end() {
  HostWait site = this->site(XD_PHASE_DONE);
  if (outlives_) return end_through_losses(site);
  if (remote_ != nullptr) {
    // A near rank, or one that this rank has sent something to, may itself be waiting for another
    // machine, and is to name the rank there first.
    site.timeout_ms = static_cast<int>(
        std::min(std::int64_t{2} * this->comm().timeout_ms(), std::int64_t{INT_MAX}));
    site.deadline = Deadline::after_ms(site.timeout_ms);
  }
  for (const NearRank peer : peers()) {
    this->comm().wait_for(
        peer, site, [&] { return this->done_by(peer, epoch_) == epoch_; },
        [&] { return std::max(this->done_by(peer, epoch_), this->done_by(peer, epoch_ - 1)); });
  }
  // A partner may end first, and leave before this rank hears that it has read everything.
  if (remote_ != nullptr) {
    this->comm().wait_for(
        this->self(), site, [&] { return remote_->at_rest(); }, [&] { return epoch_ - 1; },
        [&] { return remote_->late(); });
  }
}

template <class Record>
void HostTurn<Record>::end_through_losses(const HostWait& site) {
  const bool broke_before = is_broken_;
  for (const NearRank peer : peers()) {
    const auto done = [&] { return this->done_by(peer, epoch_) & ~kBroken; };
    // The rank itself has ended, or will find this one's broken flag when it enters.
    const auto touches_nothing = [&] {
      return this->comm().has_ended(peer) || (broke_before && !has_entered(peer));
    };
    wait_through_losses(
        site, [&] { return done() == epoch_ || touches_nothing(); },
        [&] { return std::max(done(), this->done_by(peer, epoch_ - 1) & ~kBroken); },
        [&] { return int{peer}; });
  }
  if (!look_for_losses()) return;
  // A peer may have noticed earlier than this rank.
  const auto finds = [&] { return (broken_by_ = missed()) >= 0; };
  wait_through_losses(
      site, finds, [&] { return epoch_; }, [] { return -1; });
}

template <class Record>
bool HostTurn<Record>::look_for_losses() {
  if (!is_broken_) is_broken_ = some_peer_broke() || missed() >= 0;
  return is_broken_;
}

template <class Record>
bool HostTurn<Record>::enter_view(std::int32_t operation, const View& view) {
  operation_ = operation;
  NearRanks members, others;
  for (const NearRank peer : peers()) {
    const bool stays = view.members.has(peer) && this->comm().errors().incarnation(peer) == 0;
    (stays ? members : others).push_back(peer);
  }
  for (const NearRank peer : others) {
    if (!comes_to_view(peer, members, [&] { return this->comm().has_ended(peer); })) return false;
  }
  tell_of_view(members, view.number);
  std::uint64_t highest = epoch_;
  for (const NearRank peer : members) {
    std::optional<std::uint64_t> theirs;
    const auto has_come = [&] { return (theirs = came_to_view(peer, view.number)).has_value(); };
    if (!comes_to_view(peer, members, has_come)) return false;
    highest = std::max(highest, *theirs);
  }
  epoch_ = highest;
  std::fill(takes_part_.begin(), takes_part_.end(), false);
  takes_part_[at(this->self())] = true;
  for (const NearRank peer : members) takes_part_[at(peer)] = true;
  this->keep_peers(std::move(members));
  is_broken_ = false;
  broken_by_ = -1;
  return true;
}

// Waits for what the view needs of a peer. False where a member has ended and it is not there: the
// peer may have heard of that elsewhere, and not come to this view any more.
template <class Record>
template <class Ready>
bool HostTurn<Record>::comes_to_view(NearRank peer, const NearRanks& members, Ready&& ready) {
  bool is_ready = false;
  int lost = -1;
  wait_through_losses(
      this->site(XD_PHASE_ENTRY),
      [&] {
        // In front of the look at its words: behind its end there are no others.
        const auto ended = std::ranges::find_if(
            members, [this](NearRank member) { return this->comm().has_ended(member); });
        lost = ended == members.end() ? -1 : int{*ended};
        is_ready = ready();
        return is_ready || lost >= 0;
      },
      [&] { return last_entered(peer); }, [&] { return int{peer}; });
  if (is_ready) return true;
  is_broken_ = true;
  broken_by_ = lost;
  return false;
}

template <class Record>
void HostTurn<Record>::tell_of_view(const NearRanks& members, std::uint64_t number) const {
  for (const NearRank peer : members) {
    const NearMemory cell = view_cell(peer, this->self());
    *cell.from(offsetof(ViewCell, epoch)).template array<std::uint64_t>() = epoch_;
    cell.from(offsetof(ViewCell, number)).signal(number + 1);
    this->comm().ring(peer);
  }
}

template <class Record>
std::optional<std::uint64_t> HostTurn<Record>::came_to_view(NearRank source,
                                                            std::uint64_t number) const {
  for (const NearRank owner : this->comm().hosts().near()) {
    const NearMemory cell = view_cell(owner, source);
    if (cell.from(offsetof(ViewCell, number)).seen() == number + 1)
      return *cell.from(offsetof(ViewCell, epoch)).template array<std::uint64_t>();
  }
  return {};
}

}  // namespace xd::turn
