// The command line of crossdock-run.
#pragma once

#include <chrono>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

namespace xd::run {

struct Options {
  int ranks = 0;
  bool threads = false;  // one process that starts all ranks itself
  bool prefix = true;    // "[rank] " before each line; off where one process has all ranks
  std::chrono::milliseconds timeout{600'000};
  std::chrono::milliseconds grace{5'000};
  std::set<int> expendable;
  int respawns = 0;        // of each rank that fails while another runs
  std::vector<int> hosts;  // ranks per host, if ranks are to count to several
  std::vector<std::string> command;
  bool help = false;
  bool version = false;

  int processes() const { return threads ? 1 : ranks; }
};

class UsageError : public std::runtime_error {
  using std::runtime_error::runtime_error;
};

// `arguments` without the program's own name. Throws UsageError. With help or version set the
// other fields may be incomplete.
Options parse_options(std::vector<std::string> arguments);

const char* help_text();

}  // namespace xd::run
