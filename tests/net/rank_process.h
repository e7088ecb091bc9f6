// A rank that is a process of its own on one of the test's hosts. It does what it is told over its
// standard input, a word a line, and answers each by a line (rank_main.cc).
#pragma once

#include <sys/types.h>

#include <chrono>
#include <map>
#include <string>

#include "base/fd.h"
#include "net/net_hosts.h"

namespace xd::test {

class RankProcess {
 public:
  using Settings = std::map<std::string, std::string>;  // environment variables

  RankProcess(const NetHosts& hosts, int host, const Settings& settings);
  ~RankProcess();  // kills the process
  RankProcess(const RankProcess&) = delete;
  RankProcess& operator=(const RankProcess&) = delete;

  void tell(const std::string& order) const;
  // The next line; throws std::runtime_error if none comes in time.
  std::string answer(int within_ms = 20000);
  std::string ask(const std::string& order, int within_ms = 20000) {
    tell(order);
    return answer(within_ms);
  }

  void signal(int number) const;
  void kill();  // and returns when it is gone
  pid_t pid() const { return pid_; }

 private:
  pid_t pid_ = -1;
  UniqueFd input_, output_;
  std::string received_;
};

// Does a rank's work, if this process is one, and returns true.
bool run_if_rank_process();

}  // namespace xd::test
