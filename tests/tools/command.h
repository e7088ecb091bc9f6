// Runs a program from a test and looks at what it prints, how it ends, and what it leaves behind.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <functional>
#include <string>
#include <vector>

#include "base/fd.h"

namespace xd::test {

struct Finished {
  int code = -1;  // as a shell tells it; -1 if it had to be killed after a minute
  std::string out;
  std::string err;
  std::chrono::milliseconds time{0};
};

class Command {
 public:
  explicit Command(const std::vector<std::string>& arguments);
  ~Command();
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  void signal(int number) const;
  std::string out() const;              // so far
  std::vector<pid_t> children() const;  // processes that it has started itself
  Finished wait();

 private:
  std::chrono::steady_clock::time_point start_;
  UniqueFd out_, err_;
  pid_t pid_ = -1;
};

// Looks again and again until it holds, for 20 seconds at most; returns whether it did.
bool eventually(const std::function<bool()>& condition);

// Whether a process exists that is not a zombie.
bool alive(pid_t pid);

std::vector<std::string> lines_of(const std::string& text);

}  // namespace xd::test
