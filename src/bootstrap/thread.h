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
  sigset_t all, previous;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &previous);
  std::thread thread;
  try {
    thread = std::thread(std::forward<Body>(body));
  } catch (const std::system_error& error) {
    pthread_sigmask(SIG_SETMASK, &previous, nullptr);
    fail(XD_ERROR_SYSTEM, "start of thread ", name, ": ", error.what());
  }
  pthread_sigmask(SIG_SETMASK, &previous, nullptr);
  pthread_setname_np(thread.native_handle(), name);
  return thread;
}

}  // namespace xd
