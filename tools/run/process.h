// One process of the job: starts it, signals it and all processes that it has started, and reaps
// it.
#pragma once

#include <signal.h>
#include <sys/types.h>

#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "base/fd.h"
#include "guardian.h"

namespace xd::run {

// The program cannot be started; the code is what a shell would return: 126 or 127.
class StartError : public std::runtime_error {
 public:
  StartError(int code, const std::string& text) : std::runtime_error(text), code_(code) {}
  int code() const { return code_; }

 private:
  int code_;
};

struct Start {
  const std::vector<std::string>& command;
  const std::vector<std::string>& environment;
  const sigset_t& signal_mask;  // the signal mask that the program gets
  bool capture;                 // pipes for its output, else it has the launcher's
};

class Process {
 public:
  struct End {
    int code;  // as a shell tells it: exit code, or 128 + signal
    bool by_signal;
    std::string text;  // "exit code 3"
  };

  // Returns when the program runs. Throws StartError; std::system_error. `guardian` outlives it.
  Process(const Start& start, const Guardian& guardian);
  Process(Process&&) = delete;
  ~Process();  // kills the processes that still run

  bool running() const { return pid_ > 0; }
  // Signals the process and all that it has started, as far as they are still in its session.
  void signal(int number) const noexcept;
  // Returns how the process has ended, or nothing if it runs. Processes that it has left behind are
  // killed. Never blocks.
  std::optional<End> reap();

  // Read ends, if output is captured.
  UniqueFd out;
  UniqueFd err;

 private:
  const Guardian& guardian_;
  pid_t pid_ = -1;
};

}  // namespace xd::run
