#include "mesh/inbox.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"
#include "base/rank_list.h"

namespace xd {

MeshInbox::MeshInbox(int rank, int num_ranks) : rank_(rank), peers_(at(num_ranks)) {}

bool MeshInbox::deliver(int rank, std::uint64_t round, MeshItem item) {
  const std::lock_guard lock(mutex_);
  Peer& peer = peers_[at(rank)];
  if (round != peer.rounds_received || round > rounds_begun_) return false;
  ++peer.rounds_received;
  peer.letters.push_back({round, std::move(item)});
  changed_.notify_all();
  return true;
}

void MeshInbox::mark_lost(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  for (const int rank : ranks) peers_[at(rank)].lost = true;
  changed_.notify_all();
}

void MeshInbox::mark_left(int rank) {
  const std::lock_guard lock(mutex_);
  peers_[at(rank)].left = true;
  changed_.notify_all();
}

void MeshInbox::mark_failed(int rank, std::string_view text) {
  const std::lock_guard lock(mutex_);
  peers_[at(rank)].left = peers_[at(rank)].failed = true;
  keep_failure(rank, XD_ERROR_MISMATCH, text);
  changed_.notify_all();
}

void MeshInbox::close(xd_status status, std::string_view text) noexcept {
  const std::lock_guard lock(mutex_);
  failure_.rank = -1;  // this rank's own failure comes before a peer's
  keep_failure(rank_, status, text);
  changed_.notify_all();
}

void MeshInbox::keep_failure(int rank, xd_status status, std::string_view text) {
  if (failure_.rank >= 0) return;
  failure_.rank = rank;
  failure_.status = status;
  failure_.size = std::min(text.size(), failure_.text.size());
  std::ranges::copy_n(text.begin(), static_cast<std::ptrdiff_t>(failure_.size),
                      failure_.text.begin());
}

void MeshInbox::mark_aborted(int rank) {
  const std::lock_guard lock(mutex_);
  if (!aborted_by_) aborted_by_ = rank;
  changed_.notify_all();
}

void MeshInbox::cancel() noexcept {
  const std::lock_guard lock(mutex_);
  cancelled_ = true;
  changed_.notify_all();
}

std::uint64_t MeshInbox::begin_round() {
  const std::lock_guard lock(mutex_);
  const std::uint64_t round = rounds_begun_++;
  // Items of a round that was given up are of no use to this one.
  for (Peer& peer : peers_)
    while (!peer.letters.empty() && peer.letters.front().round < round) peer.letters.pop_front();
  return round;
}

void MeshInbox::wait_for(std::uint64_t round, const Deadline& deadline, std::span<MeshItem> items) {
  Interruption interruption;
  std::unique_lock lock(mutex_);
  while (!complete(round)) {
    check_locked(round);
    if (deadline.passed()) {
      const std::vector<int> absent = missing(round);
      throw Error(XD_ERROR_TIMEOUT,
                  error_text("rank ", rank_, " waited too long for ", rank_list(absent)),
                  absent.front());
    }
    changed_.wait_until(lock, interruption.next(deadline).when());
    lock.unlock();
    interruption.check();
    lock.lock();
  }
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    if (r == rank_) continue;
    Peer& peer = peers_[at(r)];
    if (!items.empty()) items[at(r)] = std::move(peer.letters.front().item);
    peer.letters.pop_front();
  }
}

void MeshInbox::check(std::uint64_t round) {
  const std::lock_guard lock(mutex_);
  check_locked(round);
}

bool MeshInbox::has_letter(const Peer& peer, std::uint64_t round) const {
  return !peer.letters.empty() && peer.letters.front().round == round;
}

bool MeshInbox::complete(std::uint64_t round) const {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != rank_ && !has_letter(peers_[at(r)], round)) return false;
  return true;
}

std::vector<int> MeshInbox::missing(std::uint64_t round) const {
  std::vector<int> result;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != rank_ && !has_letter(peers_[at(r)], round)) result.push_back(r);
  return result;
}

// Throws if a peer has failed. Peers that left afterwards did so because of it.
void MeshInbox::throw_failure() const {
  if (failure_.rank < 0) return;
  throw Error(failure_.status, error_text("rank ", failure_.rank, " failed: ", failure_.view()),
              failure_.rank);
}

void MeshInbox::check_locked(std::uint64_t round) const {
  if (failure_.rank == rank_) throw Error(failure_.status, error_text(failure_.view()));
  if (cancelled_) fail(XD_ERROR_ABORTED, "the wait of rank ", rank_, " for its peers was ended");
  for (const Peer& peer : peers_)
    if (peer.failed && !has_letter(peer, round)) throw_failure();
  if (aborted_by_) throw_failure();  // the failure was the reason for the abort
  if (aborted_by_) fail(XD_ERROR_ABORTED, "rank ", *aborted_by_, " has aborted");
  std::vector<int> lost;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peers_[at(r)].lost) lost.push_back(r);
  if (!lost.empty())
    fail(XD_ERROR_PEER_LOST, rank_list(lost), ": the process ended without saying goodbye");
  // A peer that left after it had sent its part is not missed.
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peers_[at(r)].left && !has_letter(peers_[at(r)], round)) {
      throw_failure();
      throw Error(XD_ERROR_PEER_LOST, error_text("rank ", r, " has left"), r);
    }
}

}  // namespace xd
