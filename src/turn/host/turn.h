// Turns on the host: the five verbs of turn/entry.h, for operations that run on the caller's
// thread.
#pragma once

#include <algorithm>
#include <climits>
#include <cstdint>
#include <span>
#include <utility>
#include <vector>

#include "base/math.h"
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
      : HostCells<Record>(comm, number, map, std::move(areas), kStages),
        subject_(subject),
        records_(at(comm.num_ranks())),
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
  // The records of all ranks, after await(); this rank's own, after enter().
  std::span<const Record> records() const { return records_; }
  const Record& record_of(int rank) const { return records_[at(rank)]; }

  // ---- For what a family makes its ranks wait for inside an operation ----

  HostWait site(xd_phase phase) const {
    return {.phase = phase,
            .group = this->number(),
            .operation = operation_,
            .epoch = epoch_,
            .deadline = this->comm().deadline(),
            .needs_all_ranks = true,
            .progress = remote_};
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

  observe::Subject& subject_;
  std::vector<Record> records_;  // records of the current operation
  std::int32_t operation_ = 0;
  std::uint64_t epoch_ = 0;
  RemoteTurn<Record>* remote_ = nullptr;  // none: all ranks are near
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
}

template <class Record>
template <class Ranks>
void HostTurn<Record>::await_from(const Ranks& ranks, observe::WaitTimes& times) {
  const HostWait site = this->site(XD_PHASE_ENTRY);
  const auto has_entered = [this](int peer) { return this->entered(peer, epoch_) == epoch_; };
  // Of ranks in two different calls, the lowest of all and the lowest in the other call wait for
  // one another then.
  const auto lowest_missing = [&] {
    for (int r = 0; r < this->comm().num_ranks(); ++r) {
      if (r != this->self() && !has_entered(r)) return r;
    }
    return -1;
  };
  for (const auto& rank : ranks) {
    const int peer = rank;
    this->comm().wait_for(
        peer, site,
        [&] {
          const bool here = has_entered(peer);
          times.look(peer, here, ranks, has_entered);
          return here;
        },
        [&] { return last_entered(peer); }, lowest_missing);
    records_[at(peer)] = this->posted_by(peer, epoch_);
  }
}

template <class Record>
void HostTurn<Record>::leave() {
  for (const NearRank peer : peers()) this->post_done(peer, epoch_);
  ring_peers();
}

template <class Record>
void HostTurn<Record>::end() {
  HostWait site = this->site(XD_PHASE_DONE);
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

}  // namespace xd::turn
