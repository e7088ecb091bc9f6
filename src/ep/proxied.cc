#include "ep/proxied.h"

#include <chrono>
#include <thread>

#include "base/deadline.h"

namespace xd::ep {

net::Proxy::Calls Proxied::calls() {
  return {.failed = [this](const Error& error) { give_up(error); },
          .sent = [this](const net::Links::Sent& sent) { count(sent); },
          .is_over = [this] { return nobody_waits(); }};
}

void Proxied::outlive_group() {
  const std::lock_guard lock(mutex_);
  counters_ = nullptr;
}

// On the proxy's thread.
void Proxied::count(const net::Links::Sent& sent) {
  const std::lock_guard lock(mutex_);
  if (counters_ == nullptr) return;
  counters_->net_puts.set(sent.puts);
  counters_->net_bytes.set(sent.bytes);
}

// Puts that are made now have no reader any more. Not so behind an operation error that has
// finished communicators one by one: others may still be in that operation, and wait for this
// rank's credits.
bool Proxied::nobody_waits() const {
  const FatalError* error = comm_.errors().fatal_error();
  return error != nullptr && error->met_by_all == 0;
}

// On the proxy's thread. An engine may notice first that a neighbour has ended. Then the watch
// names it with its process or host, for all ranks alike, and that is what ends operations here.
void Proxied::give_up(const Error& error) const {
  const Errors& errors = comm_.errors();
  const Deadline verdict = Deadline::after_ms(comm_.verdict_ms());
  while (error.status() == XD_ERROR_SYSTEM && !verdict.passed()) {
    if (errors.fatal_error() != nullptr) return;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  const Cause cause = cause_of(error, comm_.rank());
  comm_.errors().raise_cause({.status = error.status(),
                              .phase = XD_PHASE_ROWS,
                              .rank = comm_.rank(),
                              .peer = cause.peer,
                              .group = group_},
                             cause);
}

}  // namespace xd::ep
