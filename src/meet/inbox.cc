#include "meet/inbox.h"

#include <algorithm>
#include <utility>

#include "base/error.h"
#include "base/interrupt.h"
#include "base/math.h"

namespace xd {

std::string reason_of(int silence_ms) {
  return silence_ms == 0 ? "the process ended without saying goodbye"
                         : concat("the host has not answered for ", silence_ms, " ms");
}

MeshInbox::MeshInbox(const Rails& rails, const RankNames& names)
    : rails_(rails), names_(names), rank_(rails.rank()), peers_(at(rails.num_ranks())) {}

bool MeshInbox::deliver(int rank, std::uint64_t round, MeshItem item) {
  const std::lock_guard lock(mutex_);
  if (!expects_locked(rank, round)) return false;
  Peer& peer = peers_[at(rank)];
  ++peer.rounds_received;
  peer.letters.push_back({round, std::move(item)});
  changed_.notify_all();
  return true;
}

bool MeshInbox::expects(int rank, std::uint64_t round) {
  const std::lock_guard lock(mutex_);
  return expects_locked(rank, round);
}

void MeshInbox::mark_lost(const Loss& loss) {
  const std::lock_guard lock(mutex_);
  for (const int rank : loss.ranks) peers_[at(rank)].lost = loss.silence_ms;
  changed_.notify_all();
}

void MeshInbox::mark_left(int rank) {
  const std::lock_guard lock(mutex_);
  peers_[at(rank)].left = true;
  changed_.notify_all();
}

void MeshInbox::mark_failed(int rank, xd_status status, std::string_view text) {
  const std::lock_guard lock(mutex_);
  peers_[at(rank)].left = peers_[at(rank)].failed = true;
  keep_failure(rank, status, text);
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

std::uint64_t MeshInbox::rounds_begun() {
  const std::lock_guard lock(mutex_);
  return rounds_begun_;
}

void MeshInbox::wait_for(std::uint64_t round, const Deadline& deadline, std::span<MeshItem> items,
                         const Look& look) {
  constexpr int kFirstLookMs = 250, kBetweenLooksMs = 100;
  Interruption interruption;
  Deadline next_look = look ? Deadline::after_ms(kFirstLookMs) : deadline;
  std::unique_lock lock(mutex_);
  while (!complete(round)) {
    check_locked(round);
    if (deadline.passed()) {
      const std::vector<int> absent = missing(round);
      throw Error(XD_ERROR_TIMEOUT,
                  error_text(names_.of(rank_), " waited too long for ", names_.of(absent)),
                  absent.front());
    }
    const Deadline& wake = next_look.when() < deadline.when() ? next_look : deadline;
    changed_.wait_until(lock, interruption.next(wake).when());
    const int missing = look && next_look.passed() ? first_missing(round) : -1;
    lock.unlock();
    interruption.check();
    if (missing >= 0) {
      look(round, missing);
      next_look = Deadline::after_ms(kBetweenLooksMs);
    }
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

int MeshInbox::first_missing(std::uint64_t round) const {
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (r != rank_ && !has_letter(peers_[at(r)], round)) return r;
  return -1;
}

// The letters of ranks behind a relay may be held up there, so where its own is missing, too, it
// alone is named.
std::vector<int> MeshInbox::missing(std::uint64_t round) const {
  const auto has = [&](int rank) { return has_letter(peers_[at(rank)], round); };
  std::vector<int> result;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    const int source = rails_.source_of(r);
    if (r != rank_ && !has(r) && (source == r || has(source))) result.push_back(r);
  }
  return result;
}

// Throws if a peer has failed. Peers that left afterwards did so because of it.
void MeshInbox::throw_failure() const {
  if (failure_.rank < 0) return;
  throw Error(failure_.status, error_text(names_.of(failure_.rank), " failed: ", failure_.view()),
              failure_.rank);
}

void MeshInbox::check_locked(std::uint64_t round) const {
  if (failure_.rank == rank_) throw Error(failure_.status, error_text(failure_.view()));
  if (cancelled_) fail(XD_ERROR_ABORTED, "the wait of rank ", rank_, " for its peers was ended");
  for (const Peer& peer : peers_)
    if (peer.failed && !has_letter(peer, round)) throw_failure();
  if (aborted_by_) throw_failure();  // the failure was the reason for the abort
  if (aborted_by_) fail(XD_ERROR_ABORTED, names_.of(*aborted_by_), " has aborted");
  std::vector<int> lost;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peers_[at(r)].lost) lost.push_back(r);
  if (!lost.empty())
    fail(XD_ERROR_PEER_LOST, names_.of(lost), ": ", reason_of(*peers_[at(lost[0])].lost));
  // A peer that left after it had sent its part is not missed. A relay passes letters on before
  // it leaves, so the others behind it do not come.
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r) {
    const int source = rails_.source_of(r);
    const int gone = peers_[at(r)].left ? r : peers_[at(source)].left ? source : -1;
    if (gone < 0 || has_letter(peers_[at(r)], round)) continue;
    throw_failure();
    throw Error(XD_ERROR_PEER_LOST, error_text(names_.of(gone), " has left"), gone);
  }
}

}  // namespace xd
