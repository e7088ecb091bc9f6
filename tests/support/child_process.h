// A process that a test starts: this program again, which reads lines from the test and writes
// lines for it.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace xd::test {

class ChildProcess {
 public:
  using Clock = std::chrono::steady_clock;

  struct Program {
    std::vector<std::string> arguments;           // behind the program's name
    std::map<std::string, std::string> settings;  // environment variables, besides this process's
    std::string network;  // the name of its network namespace; empty = this process's
  };

  struct Line {
    std::string text;
    Clock::time_point when;  // at which it was read
  };

  // Throws std::runtime_error.
  explicit ChildProcess(const Program& program);
  ~ChildProcess();  // kills the process
  ChildProcess(const ChildProcess&) = delete;
  ChildProcess& operator=(const ChildProcess&) = delete;

  pid_t pid() const { return pid_; }
  void signal(int number) const;
  // Kills the process by SIGKILL, and returns when it is gone. Nothing if it has ended before.
  void kill();
  bool has_ended() const;  // and still can be waited for
  // Waits for a process that ends by itself, and returns its status as waitpid() tells it; nothing
  // if it does not end in time.
  std::optional<int> wait_for_end(std::chrono::milliseconds patience);

  // Throws std::runtime_error if the process does not listen any more.
  void tell(const std::string& line) const;
  void close_input() { close(input_); }

  // The end of the process's output: readable by poll(); -1 when it writes no more.
  int output() const { return output_; }
  void read();  // reads all that is there; call it when output() is readable
  std::optional<Line> take_line();
  // The next line. Throws std::runtime_error if none comes in time.
  std::string wait_for_line(std::chrono::milliseconds patience);
  const std::string& partial() const { return partial_; }  // the beginning of a line

 private:
  static void close(int& end);

  pid_t pid_ = -1;
  int input_ = -1, output_ = -1;  // this process's ends of pipes
  std::string partial_;
  std::deque<Line> lines_;
};

}  // namespace xd::test
