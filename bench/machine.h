// The facts that a reader needs to judge a table: machine, build, and reasons to doubt the numbers.
#pragma once

#include <string>
#include <vector>

namespace bench {

struct Machine {
  std::string processor;  // name, cores that this process may use, system
  std::string build;      // commit, build type, compiler
  std::string date;       // today, like "2026-11-25", in UTC
  std::vector<std::string> doubts;
};

Machine describe_machine(int ranks);

}  // namespace bench
