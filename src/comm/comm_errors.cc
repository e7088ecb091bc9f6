// Comm's fatal errors: raising, reporting, and the events of the watch thread.
#include <sched.h>
#include <unistd.h>

#include "comm/comm.h"

namespace xd {
namespace {

std::string text_of_lost(std::span<const int> ranks) {
  if (ranks.size() == 1) return describe({.status = XD_ERROR_PEER_LOST, .peer = ranks[0]});
  std::string list;
  for (const int rank : ranks) list += concat(list.empty() ? "" : ", ", rank);
  return concat("ranks ", list, " were lost: their process has ended");
}

}  // namespace

void Comm::check_process() const {
  XD_REQUIRE(process_ == ::getpid(), "this communicator was made by process ", process_,
             ", and process ", ::getpid(), " is a fork of it: make communicators after forking");
}

void Comm::check_usable() const {
  check_process();
  XD_REQUIRE(!closed_.load(std::memory_order_acquire), "the communicator has been destroyed");
  throw_if_failed();
}

const FatalError* Comm::fatal_error() const {
  return connected_.load(std::memory_order_acquire) ? controls_[index(rank_)].error() : nullptr;
}

std::string Comm::fatal_text() const {
  const FatalError* error = fatal_error();
  if (error == nullptr) return "";
  if (error->status == XD_ERROR_PEER_LOST && error->left == 0) {
    const std::lock_guard lock(raise_mutex_);
    if (!lost_text_.empty()) return lost_text_;
  }
  return describe(*error);
}

void Comm::throw_if_failed() const {
  const FatalError* error = fatal_error();
  if (error != nullptr) fail(status_of(*error), fatal_text());
}

void Comm::raise(const FatalError& error, Spread spread) {
  // Until then the mesh itself ends whatever waits.
  if (!connected_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(raise_mutex_);
  if (raised_) return;
  raised_ = true;
  controls_[index(rank_)].post(rank_, error);
  if (spread == Spread::here) return;
  for (int i = 1; i < num_ranks_; ++i) {
    controls_[index((rank_ + i) % num_ranks_)].post(rank_, error);
  }
  // Boards and bells do not reach host collectives. A peer that hears of an abort finds this error
  // on its board already.
  mesh_->send_abort();
  mesh_->cancel();
}

void Comm::abort() {
  check_process();
  XD_REQUIRE(!closed_.load(std::memory_order_acquire), "the communicator has been destroyed");
  raise({.status = XD_ERROR_ABORTED, .rank = rank_, .peer = rank_}, Spread::everywhere);
}

void Comm::on_lost(std::span<const int> ranks) {
  {
    const std::lock_guard lock(raise_mutex_);
    if (lost_text_.empty()) lost_text_ = text_of_lost(ranks);
  }
  raise({.status = XD_ERROR_PEER_LOST, .rank = rank_, .peer = ranks[0]}, Spread::here);
}

void Comm::on_left(int rank) {
  left_[index(rank)].store(true, std::memory_order_release);
  if (connected_.load(std::memory_order_acquire)) ring(rank_);
}

void Comm::on_abort(int rank) {
  raise({.status = XD_ERROR_ABORTED, .rank = rank, .peer = rank}, Spread::here);
}

void Comm::fail_left(int peer, const WaitSite& site) {
  raise({.status = XD_ERROR_PEER_LOST,
         .phase = site.phase,
         .rank = rank_,
         .peer = peer,
         .group = site.group,
         .operation = site.operation,
         .left = 1,
         .expected_epoch = site.epoch},
        Spread::here);
  throw_if_failed();
  fail(XD_ERROR_INTERNAL, "a fatal error was raised and not recorded");
}

void Comm::fail_timeout(int peer, const WaitSite& site, std::uint64_t seen) {
  raise({.status = XD_ERROR_TIMEOUT,
         .phase = site.phase,
         .rank = rank_,
         .peer = peer,
         .group = site.group,
         .operation = site.operation,
         .timeout_ms = timeout_ms_,
         .expected_epoch = site.epoch,
         .seen_epoch = seen},
        Spread::everywhere);
  throw_if_failed();
  fail(XD_ERROR_INTERNAL, "a fatal error was raised and not recorded");
}

// Spinning is brief, and the peer may need this very core.
void Comm::relax() { ::sched_yield(); }

}  // namespace xd
