#include "comm/errors.h"

#include <unistd.h>

#include <algorithm>
#include <new>
#include <utility>

#include "base/error.h"

namespace xd {
namespace {

std::vector<RankBoard> boards_in(const std::vector<std::shared_ptr<Segment>>& segments) {
  std::vector<RankBoard> boards;
  for (const auto& segment : segments) {
    boards.emplace_back(segment->base(), static_cast<int>(segments.size()));
  }
  return boards;
}

}  // namespace

Errors::Errors(int rank, Mesh& mesh, std::vector<std::shared_ptr<Segment>> boards,
               DeviceSide* device_side)
    : rank_(rank),
      process_(::getpid()),
      mesh_(mesh),
      segments_(std::move(boards)),
      boards_(boards_in(segments_)),
      device_side_(device_side),
      left_(segments_.size()) {}

bool Errors::in_fork() const { return process_ != ::getpid(); }

void Errors::check_process() const {
  XD_REQUIRE(!in_fork(), "this communicator was made by process ", process_, ", and process ",
             ::getpid(), " is a fork of it: make communicators after forking");
}

void Errors::check_open() const {
  check_process();
  XD_REQUIRE(!closed_.load(std::memory_order_acquire), "the communicator has been destroyed");
}

void Errors::check_usable() const {
  check_open();
  throw_if_failed();
}

void Errors::throw_if_failed() const {
  const FatalError* error = fatal_error();
  if (error == nullptr) return;
  std::string text;
  try {
    text = text_of(*error);
  } catch (const std::bad_alloc&) {  // the error remains
  }
  throw Error(status_of(*error), std::move(text));
}

const FatalError* Errors::fatal_error() const {
  if (const FatalError* error = reported()) return error;
  // In a fork the pinned memory is not there.
  if (device_side_ == nullptr || in_fork()) return nullptr;
  const FatalError* met_by_kernel = device_side_->raised();
  if (met_by_kernel == nullptr) return nullptr;
  const std::lock_guard lock(mutex_);
  FatalError error = *met_by_kernel;
  if (!told_self_) learn_cause(error);
  if (error.met_by_all != 0 && cause_.text[0] != '\0') error.peer = cause_.peer;
  record(error);
  return reported();
}

// Learns this rank's account of an error that every rank meets. The caller holds mutex_.
void Errors::learn_cause(const FatalError& error) const {
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

std::string Errors::text_of(const FatalError& error) const {
  const std::lock_guard lock(mutex_);
  // A peer's report of an error that every rank meets may have come first: the text is this rank's.
  if (error.rank == rank_ || error.met_by_all != 0) {
    learn_cause(error);
    if (cause_.text[0] != '\0') return cause_.text.data();
  }
  const auto named = operations_.find(error.group);
  return describe(error, named != operations_.end() ? named->second : nullptr);
}

void Errors::name_operations(int group, const Operations& operations) {
  const std::lock_guard lock(mutex_);
  operations_[group] = &operations;
}

void Errors::explain_by(int group, Explain explain) {
  if (in_fork()) return;  // a fork's copy of the lock may be held for ever
  const std::lock_guard lock(mutex_);
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

void Errors::raise(const FatalError& error, Spread spread, const Cause* cause) {
  const std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_relaxed)) return;  // tells nothing after its goodbye
  if (cause != nullptr && !told_self_) cause_ = *cause;
  record(error);
  // Ends host collectives of other threads, since no peer will come to them.
  if (error.met_by_all != 0) mesh_.cancel();
  if (spread == Spread::here || told_peers_) return;
  tell_peers(*reported());  // the first error, which may be another one
  // Boards and bells do not reach host collectives. A peer that hears of an abort finds this error
  // on its board already.
  mesh_.send_abort();
  mesh_.cancel();
}

void Errors::raise_and_throw(const FatalError& error, Spread spread) {
  raise(error, spread);
  check_usable();
  fail(XD_ERROR_INTERNAL, "a fatal error was raised and not recorded: ", text_of(error));
}

void Errors::abort() {
  check_open();
  raise({.status = XD_ERROR_ABORTED, .rank = rank_, .peer = rank_}, Spread::everywhere);
}

// The caller holds mutex_.
void Errors::record(const FatalError& error) const {
  if (!told_self_) boards_[at(rank_)].post(rank_, error);
  told_self_ = true;
  if (device_side_ != nullptr) device_side_->set_finished();
}

// The caller holds mutex_.
void Errors::tell_peers(const FatalError& error) {
  if (told_peers_) return;
  told_peers_ = true;
  const std::size_t ranks = boards_.size();
  for (std::size_t i = 1; i < ranks; ++i) boards_[(at(rank_) + i) % ranks].post(rank_, error);
}

bool Errors::close() {
  const FatalError* error = fatal_error();
  const std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_relaxed)) return false;
  // A peer that has not heard of it yet must not take this rank's goodbye for the cause.
  if (error != nullptr) tell_peers(*error);
  // From here on raise() does nothing. Peers that leave while this rank leaves are no error.
  closed_.store(true, std::memory_order_release);
  return true;
}

void Errors::on_lost(std::span<const int> ranks) {
  FatalError error{.status = XD_ERROR_PEER_LOST, .rank = rank_, .peer = ranks[0]};
  error.num_lost = static_cast<std::int32_t>(std::min(ranks.size(), error.lost.size()));
  std::ranges::copy_n(ranks.begin(), error.num_lost, error.lost.begin());
  raise(error, Spread::here);
}

void Errors::on_left(int rank) {
  left_[at(rank)].store(true, std::memory_order_release);
  bell(rank_).ring();
  if (device_side_ != nullptr) device_side_->set_left(rank);
}

void Errors::on_abort(int rank) {
  raise({.status = XD_ERROR_ABORTED, .rank = rank, .peer = rank}, Spread::here);
}

void Errors::on_end(xd_status status, int error_number) noexcept {
  FatalError error{.status = status, .phase = XD_PHASE_HOST, .rank = rank_, .peer = rank_};
  error.error_number = error_number;
  error.deaf = 1;
  raise(error, Spread::everywhere);
}

void Errors::on_tick() {
  const FatalError* error = fatal_error();
  if (error == nullptr) return;
  // The host of the rank whose kernels met the error tells the other hosts, except of errors that
  // those notice by themselves.
  const bool spread = error->rank == rank_ && error->status != XD_ERROR_PEER_LOST &&
                      error->status != XD_ERROR_ABORTED && error->met_by_all == 0;
  raise(*error, spread ? Spread::everywhere : Spread::here);
}

void EventRelay::report_to(MeshEvents& events) {
  const std::lock_guard lock(mutex_);
  events_ = &events;
  for (std::size_t r = 0; r < left_.size(); ++r) {
    if (left_[r]) events.on_left(static_cast<int>(r));
  }
}

void EventRelay::on_lost(std::span<const int> ranks) {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) events_->on_lost(ranks);
}

void EventRelay::on_left(int rank) {
  const std::lock_guard lock(mutex_);
  left_[at(rank)] = true;
  if (events_ != nullptr) events_->on_left(rank);
}

void EventRelay::on_abort(int rank) {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) events_->on_abort(rank);
}

void EventRelay::on_end(xd_status status, int error_number) noexcept {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) events_->on_end(status, error_number);
}

void EventRelay::on_tick() {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) events_->on_tick();
}

}  // namespace xd
