// Turns failed calls of the C API into Python exceptions.
#pragma once

#include <crossdock/crossdock.h>
#include <nanobind/nanobind.h>

#include <cstdint>

namespace xdpy {

namespace nb = nanobind;

// The facts about a failed call beyond the calling thread's xd_last_error().
struct Failure {
  xd_comm* comm = nullptr;  // asked for its fatal error; NULL where there is none (any more)
  int rank = -1;            // the caller's rank; -1 = not in a communicator
  int peer = -1;            // rank that a non-fatal error is about
  int group = -1;
  int operation = -1;                               // an operation's number
  std::int64_t needed_rows = 0, capacity_rows = 0;  // after an overflow
};

// The details of a fatal error, as crossdock.errors.from_details takes them.
nb::dict fatal_details(const xd_error_info& info);

// Throws the class of crossdock.errors for `status`. Call it on the thread of the failed call,
// before any other call into the library, holding the GIL.
[[noreturn]] void raise(xd_status status, const Failure& failure);

// Throws unless `status` is XD_SUCCESS.
inline void check(xd_status status, const Failure& failure = {}) {
  if (status != XD_SUCCESS) raise(status, failure);
}

// From now on this thread handles signals while it waits inside the library: see signals.cc.
void handle_signals_in_waits();
void throw_what_a_handler_raised();
bool in_signal_handler();  // true in a handler that runs while this thread waits inside the library

// Runs fn() -> xd_status without the GIL and returns its result. It is for every call that may wait
// for a peer, or for another thread that does. On Python's main thread signals are handled
// meanwhile; an exception of a handler, such as Ctrl-C's, ends the wait, aborts the communicator,
// and is thrown here.
template <class Fn>
xd_status without_gil(Fn fn) {
  handle_signals_in_waits();
  xd_status status;
  {
    const nb::gil_scoped_release released;
    status = fn();
  }
  throw_what_a_handler_raised();
  return status;
}

// Throws InvalidArgument for a mistake that the bindings find themselves.
[[noreturn]] void raise_invalid(const char* text, int rank = -1);

}  // namespace xdpy
