// Threads of the library.
#pragma once

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <thread>
#include <utility>

#include "base/error.h"

namespace xd {

// Starts a thread that shows `name` (at most 15 characters) in debuggers and takes no signals: the
// application's handlers keep running on the application's threads. Throws SYSTEM.
template <class Body>
std::thread start_thread(const char* name, Body&& body) {
  // Signals are blocked while the thread starts, since it inherits the mask.
  struct SignalsBlocked {
    SignalsBlocked() {
      sigset_t all;
      sigfillset(&all);
      pthread_sigmask(SIG_SETMASK, &all, &previous);
    }
    ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &previous, nullptr); }
    sigset_t previous;
  } const blocked;
  try {
    return std::thread([name, body = std::forward<Body>(body)]() mutable {
      pthread_setname_np(pthread_self(), name);
      body();
    });
  } catch (const std::system_error& error) {
    fail(XD_ERROR_SYSTEM, "start of thread ", name, ": ", error.what());
  }
}

}  // namespace xd
