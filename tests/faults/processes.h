// Rank processes of a fault test, and the lines that they have reported.
#pragma once

#include <sys/types.h>

#include <chrono>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "faults/rank_program.h"
#include "support/child_process.h"

namespace xd::test {

using Clock = ChildProcess::Clock;

struct Result {
  xd_status status;
  int peer;
  xd_phase phase;
  bool outputs_written;
  std::string text;
  Clock::time_point when;  // at which it was read
};

struct Losses {
  xd_status finished_by;  // of the communicator
  std::string ranks;      // as in "1,2"
  Clock::time_point when;
};

class Processes {
 public:
  // processes[i] = the ranks of process i. All ranks run `program`.
  Processes(RankProgram program, const std::vector<std::vector<int>>& processes);

  // Each of these throws std::runtime_error if the rank does not report in time.
  void wait_until_ready(int rank);
  void wait_until_all_are_ready();
  void wait_until_it_joins(int rank);  // it is about to call
  // The end of a rank's call that joins.
  Result wait_until_ready_or_refused(int rank);
  Losses wait_for_losses(int rank);
  Result wait_for_result(int rank);
  // The rank's next result is the loss of `peer`, and has come soon after `since`.
  Result expect_loss(int rank, int peer, Clock::time_point since, std::chrono::milliseconds limit);
  std::string wait_for_after(int rank);
  void wait_until_done(int rank);
  void wait_for_progress(int rank);

  void go(int rank);
  void start();  // tells all to go when all are ready
  pid_t pid(int rank) { return child_of(rank).pid(); }
  bool lives(int rank);
  // Names of shared memory that the rank's process has mapped, and that would outlive the process.
  std::vector<std::string> named_shared_memory(int rank);
  // Kills the process by SIGKILL, and returns when it is gone. Its peers know nothing yet.
  Clock::time_point kill(int rank);
  // Starts the process of a rank that has been killed again. A rank that is told by tell() says
  // what it does.
  void restart(const RankProgram& program);
  void tell(int rank, const std::string& line);
  void stop(int rank);  // the process stands still until it is continued
  void resume(int rank);
  // Waits for a process that ends itself, and returns its status as waitpid() tells it. Throws if
  // it does not end.
  int wait_for_death(int rank);

 private:
  struct Process {
    std::vector<int> ranks;
    std::unique_ptr<ChildProcess> child;
  };
  using Line = ChildProcess::Line;

  ChildProcess& child_of(int rank);
  Line wait_for(int rank, const std::string& word);
  static Result result_of(const Line& line);
  Line wait_for_line(int rank, const std::string& wanted);
  bool read_some(std::chrono::milliseconds patience);

  std::vector<Process> processes_;
  std::map<int, std::deque<Line>> lines_;  // by rank, without the rank
};

}  // namespace xd::test
