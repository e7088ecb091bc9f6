// A rank that is a process of its own on one of the test's hosts. It does what it is told over its
// standard input, a word a line, and answers each by a line (rank/main.cc).
#pragma once

#include <map>
#include <string>

#include "net/net_hosts.h"
#include "support/child_process.h"

namespace xd::test {

class RankProcess {
 public:
  using Settings = std::map<std::string, std::string>;  // environment variables

  RankProcess(const NetHosts& hosts, int host, const Settings& settings);
  // Lets the process end by itself, unless it was killed, and fails the test if it ends badly: a
  // sanitizer speaks last.
  ~RankProcess();
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void tell(const std::string& order) const { child_.tell(order); }
  // The next line; throws std::runtime_error if none comes in time.
  std::string answer(int within_ms = 20000);
  std::string ask(const std::string& order, int within_ms = 20000) {
    tell(order);
    return answer(within_ms);
  }
  void dismiss() { child_.close_input(); }  // it ends when it has answered

  void signal(int number) const { child_.signal(number); }
  void kill() { child_.kill(); }  // and returns when it is gone
  pid_t pid() const { return child_.pid(); }

 private:
  ChildProcess child_;
};

// Does a rank's work, if this process is one, and returns true.
bool run_if_rank_process();

}  // namespace xd::test
