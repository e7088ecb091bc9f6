#include "comm/errors.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "base/error.h"

namespace xd {
namespace {

std::vector<RankBoard> boards_in(const std::vector<std::shared_ptr<Segment>>& segments) {
  std::vector<RankBoard> boards;
  for (const auto& segment : segments) {
    const NearMemory memory = segment ? NearMemory(segment->base()) : NearMemory();
    boards.emplace_back(memory, static_cast<int>(segments.size()));
  }
  return boards;
}

// The number of the last operation.
std::int64_t last_of(const Operations& operations) {
  return operations.first + static_cast<std::int64_t>(operations.names.size()) - 1;
}

}  // namespace

Cause cause_of(const Error& error, int rank) {
  Cause cause{.peer = error.peer() >= 0 ? error.peer() : rank, .text = {}};
  std::snprintf(cause.text.data(), cause.text.size(), "%s", error.text().c_str());
  return cause;
}

Errors::Errors(const HostMap& hosts, Mesh& mesh, std::vector<std::shared_ptr<Segment>> boards,
               DeviceSide* device_side, xd_comm_peer_loss on_peer_loss)
    : hosts_(hosts),
      rank_(hosts.self()),
      process_(::getpid()),
      mesh_(mesh),
      names_(mesh.names()),
      segments_(std::move(boards)),
      boards_(boards_in(segments_)),
      notes_(hosts, mesh, boards_),
      cards_(hosts, mesh, boards_, segments_),
      device_side_(device_side),
      on_peer_loss_(on_peer_loss),
      presence_(segments_.size()),
      has_reported_(segments_.size()),
      incarnations_(segments_.size()) {}

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
  const ToldError* error = fatal_error();
  if (error == nullptr) return;
  std::string text;
  try {
    text = text_of(*error);
  } catch (const std::bad_alloc&) {  // the error remains
  }
  throw Error(status_of(*error), std::move(text));
}

// The error of this rank's board. Where that is a peer's report of an error that every rank meets,
// and this rank has met it, it is this rank's own.
const ToldError* Errors::reported() const {
  const ToldError* first = own_board().error();
  if (first == nullptr || !is_peers_report(*first)) return first;
  // Acquire: met_ is complete.
  return has_met_.load(std::memory_order_acquire) ? &met_ : first;
}

const ToldError* Errors::fatal_error() const {
  const ToldError* error = reported();
  if (error != nullptr && !is_peers_report(*error)) return error;
  // In a fork the pinned memory is not there.
  if (device_side_ == nullptr || in_fork()) return error;
  const FatalError* met_by_kernel = device_side_->raised();
  if (met_by_kernel == nullptr) return error;
  // Kernels that the host has told to leave report that alone, and have met nothing.
  if (error != nullptr && met_by_kernel->met_by_all == 0) return error;
  const std::lock_guard lock(mutex_);
  take_over(*met_by_kernel);
  return reported();
}

bool Errors::ends_wait(int group, std::int32_t operation, std::uint64_t epoch) const {
  const FatalError* error = fatal_error();
  if (error == nullptr) return false;
  if (!is_peers_report(*error) || error->group != group || error->expected_epoch != epoch) {
    return true;
  }
  const std::lock_guard lock(mutex_);
  if (told_self_) return true;  // something else has happened since, a lost peer for example
  const Operations* family = operations_with(operation);
  return family != nullptr && !family->counts_together(error->operation, operation);
}

// The caller holds mutex_.
void Errors::take_over(const FatalError& met_by_kernel) const {
  ToldError error = met_by_kernel;
  if (error.met_by_all != 0) {
    const Cause cause = explained(error);
    if (cause.text[0] != '\0') error.peer = cause.peer;
    meet(error, cause);
  }
  record(error);
}

// Notes an error of a group that this rank has met itself, unless another one has finished the
// communicator. The caller holds mutex_.
void Errors::meet(const FatalError& error, const Cause& cause) const {
  const FatalError* first = reported();
  if (has_met_.load(std::memory_order_relaxed)) return;
  if (first != nullptr && !is_peers_report(*first)) return;
  met_ = error;
  cause_ = cause;
  has_met_.store(true, std::memory_order_release);
}

// The words of the group for an error of its kernels; none if there is no memory for them. The
// caller holds mutex_.
Cause Errors::explained(const FatalError& error) const {
  const auto found = explanations_.find(error.group);
  if (found == explanations_.end()) return {};
  try {
    return found->second(error);
  } catch (const std::bad_alloc&) {
    return {};
  }
}

std::string Errors::call_text(int group, int operation, std::uint64_t epoch) {
  std::string text;
  {
    const std::lock_guard lock(mutex_);
    text = xd::call_text(group, operation, epoch, operations_with(operation));
  }
  notes_.with_course(group, operation,
                     [&](const Course& course) { text += concat(" (", course.detail(), ")"); });
  return text;
}

std::string Errors::text_of(const ToldError& error) const {
  const std::lock_guard lock(mutex_);
  if (error.rank == rank_ && cause_.text[0] != '\0') return cause_.text.data();
  std::string text = describe(error, operations_with(error.operation), names_);
  if (error.status != XD_ERROR_PEER_LOST || error.left != 0) return text;
  // A host that gives this one up for its silence resets the connections, as a process that ends.
  const bool may_be_deaf = error.timeout_ms == 0 && !hosts_.is_near(error.peer);
  if (may_be_deaf) text += ", or its host has given this one up for silence, as its ranks say then";
  if (!masks_losses()) {
    text += ", which finishes a communicator with on_peer_loss = FATAL";
  }
  return text;
}

// The table that has this operation, or nullptr. The caller holds mutex_.
const Operations* Errors::operations_with(std::int32_t operation) const {
  const auto found = std::ranges::find_if(
      operations_, [&](const Operations* table) { return table->knows(operation); });
  return found != operations_.end() ? *found : nullptr;
}

void Errors::name_operations(const Operations& operations) {
  const std::lock_guard lock(mutex_);
  for (const Operations* named : operations_) {
    if (named == &operations) return;
    if (operations.first <= last_of(*named) && named->first <= last_of(operations)) {
      fail(XD_ERROR_INTERNAL, operations.prefix, ": operations have the numbers ", operations.first,
           " to ", last_of(operations), ", expected none of ", named->first, " to ",
           last_of(*named), ", which are those of ", named->prefix);
    }
  }
  operations_.push_back(&operations);
}

void Errors::explain_by(int group, Explain explain) {
  if (in_fork()) return;  // a fork's copy of the lock may be held for ever
  const std::lock_guard lock(mutex_);
  if (explain) {
    explanations_[group] = std::move(explain);
  } else {
    explanations_.erase(group);
  }
}

void Errors::raise(const ToldError& error, Spread spread, const Cause* cause) {
  const std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_relaxed)) return;  // tells nothing after its goodbye
  if (cause != nullptr) meet(error, *cause);
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

void Errors::raise_and_throw(const ToldError& error, Spread spread) {
  raise(error, spread);
  check_usable();
  fail(XD_ERROR_INTERNAL, "a fatal error was raised and not recorded: ", text_of(error));
}

void Errors::abort() {
  check_open();
  raise({.status = XD_ERROR_ABORTED, .rank = rank_, .peer = rank_}, Spread::everywhere);
}

// The caller holds mutex_.
void Errors::record(const ToldError& error) const {
  if (!told_self_) own_board().post(rank_, error);
  told_self_ = true;
  if (device_side_ != nullptr) device_side_->set_finished();
}

// The caller holds mutex_.
void Errors::tell_peers(const ToldError& error) {
  if (told_peers_) return;
  told_peers_ = true;
  for (const NearRank peer : hosts_.peers()) boards_[at(peer)].post(rank_, error);
  if (!hosts_.all_are_near()) mesh_.send_report(std::as_bytes(std::span(&error, 1)));
}

bool Errors::close() {
  const ToldError* error = fatal_error();
  const std::lock_guard lock(mutex_);
  if (closed_.load(std::memory_order_relaxed)) return false;
  // A peer that has not heard of it yet must not take this rank's goodbye for the cause.
  if (error != nullptr) tell_peers(*error);
  // From here on raise() does nothing. Peers that leave while this rank leaves are no error.
  closed_.store(true, std::memory_order_release);
  return true;
}

void Errors::require_all_ranks() const {
  if (!masks_losses()) return;
  // Ranks may have left because of a death.
  const Presence wanted = dead() >= 0 ? Presence::lost : Presence::left;
  std::vector<int> gone;
  for (int r = 0; r < static_cast<int>(presence_.size()); ++r) {
    if (presence(r) == wanted) gone.push_back(r);
  }
  if (!gone.empty()) throw_gone(gone, wanted, "; all ranks are needed");
  if (replaced() < 0) return;
  fail(XD_ERROR_UNSUPPORTED, names_.with_process(replaced()),
       " has taken the place of another process: calls that need all ranks are not there yet in a "
       "communicator with such a rank");
}

void Errors::on_replaced(int rank, std::int64_t pid) {
  mark_replaced(rank);
  incarnations_[at(rank)].fetch_add(1, std::memory_order_acq_rel);
  names_.replace_process(rank, pid);
  presence_[at(rank)].store(Presence::here, std::memory_order_release);
  bell(hosts_.self()).ring();
}

void Errors::throw_masked_loss(int rank) const {
  throw_gone({&rank, 1}, presence(rank), "; the call needs it");
}

void Errors::throw_gone(std::span<const int> gone, Presence presence, const char* needed) const {
  const char* what = presence == Presence::left   ? " left the communicator"
                     : presence == Presence::here ? " been replaced: the process before has ended"
                     : !hosts_.all_are_near()
                         ? " been lost: the process has ended or broken the protocol, or its host "
                           "has not answered"
                         : " been lost: the process has ended or broken the protocol";
  throw Error(XD_ERROR_PEER_LOST,
              error_text(names_.of(gone), gone.size() == 1 ? " has" : " have", what, needed),
              gone.front());
}

void Errors::set_lost(std::span<const int> ranks, Presence presence) {
  for (const int rank : ranks) presence_[at(rank)].store(presence, std::memory_order_release);
  if (presence == Presence::lost && dead() < 0) dead_.store(ranks[0], std::memory_order_release);
  bell(hosts_.self()).ring();
}

void Errors::on_lost(const Loss& loss) {
  const std::span<const int> ranks = loss.ranks;
  if (masks_losses()) {
    set_lost(ranks, Presence::lost);
    cards_.on_lost();
    if (device_side_ == nullptr) return;
    for (const int rank : ranks) device_side_->set_lost(rank, false);
    return;
  }
  FatalError error{
      .status = XD_ERROR_PEER_LOST, .rank = rank_, .peer = ranks[0], .timeout_ms = loss.silence_ms};
  error.num_lost = static_cast<std::int32_t>(std::min(ranks.size(), error.lost.size()));
  std::ranges::copy_n(ranks.begin(), error.num_lost, error.lost.begin());
  raise(error, Spread::here);
  set_lost(ranks, Presence::lost);  // a wait that sees it finds the error, too
}

void Errors::on_left(int rank) {
  set_lost({&rank, 1}, Presence::left);
  cards_.on_lost();
  if (device_side_ != nullptr) device_side_->set_lost(rank, true);
}

void Errors::on_abort(int rank) {
  raise({.status = XD_ERROR_ABORTED, .rank = rank, .peer = rank}, Spread::here);
}

// A remote rank's note, or a card of its machine or a receipt for some, or its error, which a near
// one would have written to this rank's board, and which it tells once as well.
void Errors::on_report(int rank, std::span<const std::byte> report) {
  static_assert(sizeof(WaitNote) != sizeof(ToldError) && sizeof(ToldError) <= kMaxReport);
  static_assert(sizeof(SentCard) != sizeof(ToldError) && sizeof(SentCard) != sizeof(WaitNote));
  static_assert(sizeof(CardReceipt) < sizeof(WaitNote));
  static_assert(sizeof(CardReceipt) < sizeof(ToldError) && sizeof(CardReceipt) < sizeof(SentCard));
  if (report.size() == sizeof(CardReceipt)) return cards_.take_receipt(rank, report);
  if (report.size() == sizeof(SentCard)) {
    cards_.take_card(rank, report);
    return bell(hosts_.self()).ring();
  }
  WaitNote note;
  if (report.size() == sizeof(note)) {
    std::memcpy(static_cast<void*>(&note), report.data(), sizeof(note));
    return notes_.take(rank, note);
  }
  ToldError error;
  if (report.size() != sizeof(error) || has_reported_[at(rank)]) return;
  has_reported_[at(rank)] = true;
  std::memcpy(static_cast<void*>(&error), report.data(), sizeof(error));
  own_board().post(rank, error);
}

void Errors::on_end(xd_status status, int error_number) noexcept {
  FatalError error{.status = status, .phase = XD_PHASE_HOST, .rank = rank_, .peer = rank_};
  error.error_number = error_number;
  error.deaf = 1;
  raise(error, Spread::everywhere);
}

void Errors::on_tick() {
  const ToldError* error = fatal_error();
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
  for (const auto& [rank, report] : early_) events.on_report(rank, report);
  early_.clear();
}

void EventRelay::on_lost(const Loss& loss) {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) events_->on_lost(loss);
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

void EventRelay::on_report(int rank, std::span<const std::byte> report) {
  const std::lock_guard lock(mutex_);
  if (events_ != nullptr) return events_->on_report(rank, report);
  early_.emplace_back(rank, Bytes(report.begin(), report.end()));
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
