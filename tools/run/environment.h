// The environment variables that describe a launch to its ranks.
#pragma once

#include <string>
#include <vector>

namespace xd::run {

struct JobEnvironment {
  int ranks = 0;
  bool threads = false;
  int master_port = 0;
  std::string secret;
  std::vector<int> hosts;  // ranks per host; empty = ranks name no host
};

// `inherited` ("NAME=value" each) with the variables added or replaced of a rank that has been
// started again `respawned` times.
std::vector<std::string> rank_environment(const JobEnvironment& job, int rank, int respawned,
                                          const std::vector<std::string>& inherited);

// A TCP port that no process listens on now. Ranks look for the meeting point from this port
// upwards, so there are some above it. Throws std::system_error.
int find_free_port();

// A secret that cannot be guessed, in hexadecimal digits. Throws std::system_error.
std::string make_secret();

}  // namespace xd::run
