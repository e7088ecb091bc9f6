// The fatal errors of a communicator: raising and telling them, and the events of its watch thread.
#pragma once

#include <array>
#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/math.h"
#include "base/wire.h"
#include "comm/device/side.h"
#include "comm/fatal.h"
#include "comm/hosts.h"
#include "comm/operations.h"
#include "comm/views/cards.h"
#include "comm/wait_notes.h"
#include "meet/mesh.h"
#include "memory/segment.h"

namespace xd {

// This rank's account of an error of a group that is fatal by the group's config.
struct Cause {
  int peer = -1;  // the lowest rank that the error is about
  std::array<char, 256> text{};
};
// Of an error that names its peer, or else is about `rank`.
Cause cause_of(const Error& error, int rank);

class Errors final : public MeshEvents {
 public:
  // `boards`: the segments of the near ranks, by rank, in host memory, each a RankBoard.
  // `device_side` is that of this rank's device, or nullptr on the CPU. All but the boards outlives
  // close().
  Errors(const HostMap& hosts, Mesh& mesh, std::vector<std::shared_ptr<Segment>> boards,
         DeviceSide* device_side, xd_comm_peer_loss on_peer_loss);

  // ---- Checks at the beginning of calls ----

  // Throws if the communicator is finished, closed, or was made by a parent process.
  void check_usable() const;
  // The check for calls that concern this rank alone: they also work when the communicator is
  // finished.
  void check_open() const;
  void check_process() const;
  void throw_if_failed() const;
  // True if a fatal error ends a wait in the turn that an operation takes in a group. A peer's
  // report that it has met an error in this very turn does not: this rank's part of it ends as
  // well, and meets this rank's own error. (The peer may have taken the turn with another
  // operation, where one epoch counts both: their disagreement is that error.)
  bool ends_wait(int group, std::int32_t operation, std::uint64_t epoch) const;

  // ---- Raising ----

  // Records a fatal error; on each rank the first one wins. Any thread. An error that every rank
  // notices by itself (a lost peer) is recorded here only, until this rank leaves.
  void raise(const ToldError& error, Spread spread) { raise(error, spread, nullptr); }
  void raise(const FatalError& error, Spread spread) { raise(ToldError(error), spread); }
  [[noreturn]] void raise_and_throw(const ToldError& error, Spread spread);
  [[noreturn]] void raise_and_throw(const FatalError& error, Spread spread) {
    raise_and_throw(ToldError(error), spread);
  }
  void abort();

  // Raises an error of a group that is fatal by the group's config.
  void raise_cause(const FatalError& error, const Cause& cause) {
    raise(error, error.met_by_all != 0 ? Spread::here : Spread::everywhere, &cause);
  }

  // The last that this rank says: peers that have not heard of its error do so now. From then on
  // nothing is recorded. False if it has been said before.
  bool close();
  // In a fork, where nothing can be said.
  void close_silently() { closed_.store(true, std::memory_order_release); }
  bool in_fork() const;

  // ---- Telling ----

  // The fatal error, or nullptr. An error that kernels have met is taken over here. Where a peer
  // has reported an error that every rank meets by itself, the report gives way to this rank's own
  // error as soon as this rank meets it.
  const ToldError* fatal_error() const;
  int rank() const { return rank_; }
  const RankNames& names() const { return names_; }
  // The error as one sentence.
  std::string text_of(const ToldError& error) const;
  // The operation in which a rank waits, in words.
  std::string call_text(int group, int operation, std::uint64_t epoch);
  // The long waits of all ranks.
  WaitNotes& notes() { return notes_; }
  const WaitNotes& notes() const { return notes_; }
  // The ranks' parts in decisions about views.
  Cards& cards() { return cards_; }

  // Names operations in error texts. The table stays, for all groups of its family, since a peer
  // may report an error of one that is gone here. Throws INTERNAL where numbers are another's.
  void name_operations(const Operations& operations);
  // A function that is asked for the words of a group's error of kernels, when the host takes it
  // over. It may be called on any thread, under a lock, so it must not call the communicator. Empty
  // = there is none any more.
  using Explain = std::function<Cause(const FatalError&)>;
  void explain_by(int group, Explain explain);

  // ---- Peers ----

  Doorbell& bell(NearRank rank) const { return boards_[at(rank)].bell(); }
  // True if the rank takes part in nothing any more: it has left, its process has ended, or its
  // connection has broken. Everything that it had signalled before is visible then.
  bool lost(int peer) const { return presence(peer) != Presence::here; }
  // True for those of the lost that have said goodbye.
  bool left(int peer) const { return presence(peer) == Presence::left; }
  // The first rank that was lost and has not left; -1 = none.
  int dead() const { return dead_.load(std::memory_order_acquire); }
  bool masks_losses() const { return on_peer_loss_ == XD_COMM_PEER_LOSS_MASK; }
  // Throws PEER_LOST, which finishes nothing, if losses are masked and some rank is lost, and
  // UNSUPPORTED if some rank has been replaced. This is for calls that need all ranks.
  void require_all_ranks() const;
  // Likewise for a call that needs one rank, which is lost or has been replaced.
  [[noreturn]] void throw_masked_loss(int rank) const;

  // A rank is here again, with another process. Any thread.
  void on_replaced(int rank, std::int64_t pid);
  // From now on calls that need all ranks are refused, as some rank is not the first of its place.
  void mark_replaced(int rank) { replaced_.store(rank, std::memory_order_release); }
  // A rank that has been replaced; -1 = none.
  int replaced() const { return replaced_.load(std::memory_order_acquire); }
  // How often this rank has seen the rank replaced. Arrangements with one process of a rank do not
  // hold for the next.
  std::uint32_t incarnation(int rank) const {
    return incarnations_[at(rank)].load(std::memory_order_acquire);
  }
  // The near ranks' control segments, by rank.
  const std::vector<std::shared_ptr<Segment>>& segments() const { return segments_; }
  const RankBoard& own_board() const { return boards_[at(hosts_.self())]; }

  // ---- Events of the watch thread; those of a rank that was let in later are the door's ----

  void on_lost(const Loss& loss) override;
  void on_left(int rank) override;
  void on_abort(int rank) override;
  void on_report(int rank, std::span<const std::byte> report) override;
  void on_end(xd_status status, int error_number) noexcept override;
  void on_tick() override;

 private:
  enum class Presence : std::uint8_t { here, left, lost };
  Presence presence(int peer) const { return presence_[at(peer)].load(std::memory_order_acquire); }
  void set_lost(std::span<const int> ranks, Presence presence);
  [[noreturn]] void throw_gone(std::span<const int> gone, Presence presence,
                               const char* needed) const;
  void raise(const ToldError& error, Spread spread, const Cause* cause);
  void record(const ToldError& error) const;
  void take_over(const FatalError& met_by_kernel) const;
  void meet(const FatalError& error, const Cause& cause) const;
  Cause explained(const FatalError& error) const;
  const Operations* operations_with(std::int32_t operation) const;
  void tell_peers(const ToldError& error);
  const ToldError* reported() const;
  bool is_peers_report(const FatalError& error) const {
    return error.met_by_all != 0 && error.rank != rank_;
  }

  const HostMap& hosts_;
  const int rank_;
  const int process_;  // getpid() at creation
  Mesh& mesh_;         // until close()
  const RankNames names_;
  const std::vector<std::shared_ptr<Segment>> segments_;
  const std::vector<RankBoard> boards_;  // of the near ranks, by rank
  WaitNotes notes_;
  Cards cards_;
  DeviceSide* const device_side_;
  const xd_comm_peer_loss on_peer_loss_;
  std::vector<std::atomic<Presence>> presence_;  // by rank
  std::vector<bool> has_reported_;               // by rank; the watch thread's
  std::atomic<int> dead_{-1};
  std::atomic<int> replaced_{-1};
  std::vector<std::atomic<std::uint32_t>> incarnations_;  // by rank
  std::atomic<bool> closed_{false};

  mutable std::mutex mutex_;
  mutable bool told_self_ = false;  // true: this rank has written its record of each board, once
  // The error of a group that this rank has met itself, which never changes once `has_met_` is set.
  mutable ToldError met_;
  mutable Cause cause_;  // the words of that error
  mutable std::atomic<bool> has_met_{false};
  bool told_peers_ = false;
  std::vector<const Operations*> operations_;  // one table for each family
  std::map<int, Explain> explanations_;        // by group
};

// Stands between the watch thread, which starts before the ranks have boards, and Errors. The mesh
// itself remembers events that end a wait before that; the relay passes on later which ranks have
// left, and what peers that were ready earlier have reported.
class EventRelay final : public MeshEvents {
 public:
  EventRelay(int num_ranks, int tick_ms) : left_(at(num_ranks)), tick_ms_(tick_ms) {}

  // Passes everything on from now on.
  void report_to(MeshEvents& events);

  void on_lost(const Loss& loss) override;
  void on_left(int rank) override;
  void on_abort(int rank) override;
  void on_report(int rank, std::span<const std::byte> report) override;
  void on_end(xd_status status, int error_number) noexcept override;
  int tick_ms() const override { return tick_ms_; }
  void on_tick() override;

 private:
  std::mutex mutex_;
  MeshEvents* events_ = nullptr;
  std::vector<bool> left_;
  std::vector<std::pair<int, Bytes>> early_;
  const int tick_ms_;
};

}  // namespace xd
