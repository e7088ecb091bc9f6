// All ranks of one launch, from start to exit code.
#pragma once

#include <signal.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "environment.h"
#include "guardian.h"
#include "lines.h"
#include "options.h"
#include "process.h"

namespace xd::run {

class Job {
 public:
  // Starts the ranks. Throws StartError; std::system_error.
  explicit Job(const Options& options);

  // Waits until all ranks are gone, tells on standard error what went wrong, and returns the exit
  // code.
  int run();

 private:
  struct Stream {  // one captured output of one rank
    UniqueFd from;
    int to;
    Lines lines;
  };
  struct Outcome {
    int code = 0;
    std::string text;
  };

  // A rank that has failed and is to be started again.
  struct Failed {
    int rank;
    Process::End end;
    Deadline start_at;
  };

  // Blocks the signals that the launcher handles, and reads them from `fd`.
  struct Signals {
    Signals();
    sigset_t mask_before;
    UniqueFd fd;
  };

  void start(int rank);
  bool may_start_again(int rank) const;
  void wait_to_start(int rank, const Process::End& end);
  void start_waiting();
  void start_again(const Failed& failed);
  void tell(int rank, const Process::End& end, const std::string& rest) const;
  // A failure of a rank that is not started again.
  void count(int rank, const Process::End& end);
  void drop_waiting();
  void wait_for_event();
  void read_signals();
  void reap_ranks();
  void keep_deadlines();
  void end_by(Deadline deadline);
  bool is_ending() const;
  bool others_go_on() const;
  void signal_all(int number);
  std::vector<int> running() const;
  bool only_expendable_run() const;
  void pump(Stream& stream);
  void drain();
  int report() const;

  const Options options_;
  Signals signals_;
  const JobEnvironment environment_;
  const std::vector<std::string> inherited_;
  Guardian guardian_;
  std::vector<std::unique_ptr<Process>> ranks_;
  std::vector<int> respawned_;     // how many times each rank has been started again
  std::vector<Deadline> settled_;  // when each rank's process has run for long
  std::vector<int> pause_ms_;      // before each rank's next start
  std::vector<Failed> waiting_;    // in the order of their failures
  std::vector<Stream> streams_;
  const Deadline timeout_;
  const Deadline patience_;  // of those who read the output
  // The first failure decides; failures that follow from it do not count.
  std::optional<Outcome> outcome_;
  Deadline end_at_;                  // running ranks get SIGTERM ...
  std::optional<Deadline> kill_at_;  // ... and later SIGKILL
  std::vector<int> ended_;           // ranks that had to be ended
};

}  // namespace xd::run
