// Comm's fatal errors: raising, reporting, and the events of the watch thread.
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <new>

#include "comm/comm.h"

namespace xd {

void Comm::check_process() const {
  XD_REQUIRE(process_ == ::getpid(), "this communicator was made by process ", process_,
             ", and process ", ::getpid(), " is a fork of it: make communicators after forking");
}

void Comm::check_open() const {
  check_process();
  XD_REQUIRE(!closed_.load(std::memory_order_acquire), "the communicator has been destroyed");
}

void Comm::check_usable() const {
  check_open();
  throw_if_failed();
}

const FatalError* Comm::reported() const {
  return connected_.load(std::memory_order_acquire) ? controls_[at(rank_)].error() : nullptr;
}

const FatalError* Comm::fatal_error() const {
  if (const FatalError* error = reported()) return error;
  // In a fork the pinned memory is not there.
  if (!connected_.load(std::memory_order_acquire) || device_side_ == nullptr ||
      process_ != ::getpid()) {
    return nullptr;
  }
  const FatalError* met_by_kernel = device_side_->raised();
  if (met_by_kernel == nullptr) return nullptr;
  const std::lock_guard lock(raise_mutex_);
  FatalError error = *met_by_kernel;
  if (!told_self_) learn_cause(error);
  if (error.met_by_all != 0 && cause_.text[0] != '\0') error.peer = cause_.peer;
  record(error);
  return reported();
}

// Learns this rank's account of an error that every rank meets. The caller holds raise_mutex_.
void Comm::learn_cause(const FatalError& error) const {
  if (error.met_by_all == 0 || cause_.text[0] != '\0') return;
  const auto found = explanations_.find(error.group);
  if (found == explanations_.end()) return;
  // A peer's report may have come before this rank has asked its kernel, which knows its own epoch.
  const FatalError* own = device_side_ != nullptr ? device_side_->raised() : nullptr;
  try {
    cause_ = found->second(own != nullptr && own->group == error.group ? *own : error);
  } catch (const std::bad_alloc&) {  // the error remains, without its text
  }
}

std::string Comm::text_of(const FatalError& error) const {
  const std::lock_guard lock(raise_mutex_);
  // A peer's report of an error that every rank meets may have come first: the text is this rank's.
  if (error.rank == rank_ || error.met_by_all != 0) {
    learn_cause(error);
    if (cause_.text[0] != '\0') return cause_.text.data();
  }
  const auto named = operations_.find(error.group);
  return describe(error, named != operations_.end() ? named->second : nullptr);
}

void Comm::name_operations(int group, const Operations& operations) {
  const std::lock_guard lock(raise_mutex_);
  operations_[group] = &operations;
}

void Comm::explain_by(int group, Explain explain) {
  if (process_ != ::getpid()) return;  // a fork's copy of the lock may be held for ever
  const std::lock_guard lock(raise_mutex_);
  if (explain) {
    explanations_[group] = std::move(explain);
    return;
  }
  // A peer's report of an error of that group may have come first.
  if (const FatalError* error = reported(); error != nullptr && error->group == group) {
    learn_cause(*error);
  }
  explanations_.erase(group);
}

void Comm::throw_if_failed() const {
  const FatalError* error = fatal_error();
  if (error == nullptr) return;
  std::string text;
  try {
    text = text_of(*error);
  } catch (const std::bad_alloc&) {  // the error remains
  }
  throw Error(status_of(*error), std::move(text));
}

void Comm::raise(const FatalError& error, Spread spread, const Cause* cause) {
  // Until then the mesh itself ends all waits.
  if (!connected_.load(std::memory_order_acquire)) return;
  const std::lock_guard lock(raise_mutex_);
  if (closed_.load(std::memory_order_relaxed)) return;  // tells nothing after its goodbye
  if (cause != nullptr && !told_self_) cause_ = *cause;
  record(error);
  // Ends host collectives of other threads, since no peer will come to them.
  if (error.met_by_all != 0) mesh_for_watch_->cancel();
  if (spread == Spread::here || told_peers_) return;
  tell_peers(*controls_[at(rank_)].error());  // the first error, which may be another one
  // Boards and bells do not reach host collectives. A peer that hears of an abort finds this error
  // on its board already.
  mesh_for_watch_->send_abort();
  mesh_for_watch_->cancel();
}

// Under raise_mutex_.
void Comm::record(const FatalError& error) const {
  if (!told_self_) controls_[at(rank_)].post(rank_, error);
  told_self_ = true;
  if (device_side_) device_side_->set_finished();
}

void Comm::raise_and_throw(const FatalError& error, Spread spread) {
  raise(error, spread);
  check_usable();
  fail(XD_ERROR_INTERNAL, "a fatal error was raised and not recorded: ", text_of(error));
}

// Under raise_mutex_.
void Comm::tell_peers(const FatalError& error) {
  if (told_peers_) return;
  told_peers_ = true;
  for (int i = 1; i < num_ranks_; ++i) {
    controls_[at((rank_ + i) % num_ranks_)].post(rank_, error);
  }
}

void Comm::close() {
  if (process_ != ::getpid()) {
    closed_.store(true, std::memory_order_release);
    // A fork has the watch thread's state without the thread, so the state cannot be taken down,
    // and a goodbye would be the parent's.
    [[maybe_unused]] const Mesh* left_behind = mesh_.release();
    return;
  }
  const FatalError* error = fatal_error();
  {
    const std::lock_guard lock(raise_mutex_);
    if (closed_.load(std::memory_order_relaxed)) return;
    // A peer that has not heard of it yet must not take this rank's goodbye for the cause.
    if (error != nullptr) tell_peers(*error);
    // From here on raise() does nothing. Peers that leave while this rank leaves are no error.
    closed_.store(true, std::memory_order_release);
  }
  mesh_.reset();
  // The caller has promised that no kernel runs any more; one that does is told to go.
  if (device_side_) device_side_->set_finished();
}

void Comm::abort() {
  check_open();
  raise({.status = XD_ERROR_ABORTED, .rank = rank_, .peer = rank_}, Spread::everywhere);
}

void Comm::on_lost(std::span<const int> ranks) {
  FatalError error{.status = XD_ERROR_PEER_LOST, .rank = rank_, .peer = ranks[0]};
  error.num_lost = static_cast<std::int32_t>(std::min(ranks.size(), error.lost.size()));
  std::ranges::copy_n(ranks.begin(), error.num_lost, error.lost.begin());
  raise(error, Spread::here);
}

void Comm::on_left(int rank) {
  // The store is sequentially consistent, like the one in create(), so that one of the two tells
  // the kernels.
  left_[at(rank)].store(true);
  if (!connected_.load()) return;
  ring(rank_);
  if (device_side_) device_side_->set_left(rank);
}

void Comm::on_abort(int rank) {
  raise({.status = XD_ERROR_ABORTED, .rank = rank, .peer = rank}, Spread::here);
}

void Comm::on_end(xd_status status, int error_number) noexcept {
  FatalError error{.status = status, .phase = XD_PHASE_HOST, .rank = rank_, .peer = rank_};
  error.error_number = error_number;
  error.deaf = 1;
  raise(error, Spread::everywhere);
}

// Kernels cannot wake their host, so it looks every 50 ms.
int Comm::tick_ms() const { return device_.device_type == kDLCUDA ? 50 : -1; }

void Comm::on_tick() {
  const FatalError* error = fatal_error();
  if (error == nullptr) return;
  // The host of the rank whose kernels met the error tells the other hosts, except of errors that
  // those notice by themselves.
  const bool spread = error->rank == rank_ && error->status != XD_ERROR_PEER_LOST &&
                      error->status != XD_ERROR_ABORTED && error->met_by_all == 0;
  raise(*error, spread ? Spread::everywhere : Spread::here);
}

void Comm::fail_left(int peer, const WaitSite& site) {
  FatalError error = error_at(site, XD_ERROR_PEER_LOST, peer);
  error.left = 1;
  raise_and_throw(error, Spread::here);
}

void Comm::fail_timeout(int peer, const WaitSite& site, std::uint64_t seen) {
  FatalError error = error_at(site, XD_ERROR_TIMEOUT, peer);
  error.timeout_ms = timeout_ms_;
  error.seen_epoch = seen;
  raise_and_throw(error, Spread::everywhere);
}

FatalError Comm::error_at(const WaitSite& site, xd_status status, int peer) const {
  return {.status = status,
          .phase = site.phase,
          .rank = rank_,
          .peer = peer,
          .group = site.group,
          .operation = site.operation,
          .expected_epoch = site.epoch};
}

// The thread yields, since the peer may need this very core.
void Comm::relax() { ::sched_yield(); }

}  // namespace xd
