// Output of the programs whose results the pages of docs/ quote: named sections, one block of the
// page each. page.py compares the two.
#pragma once

#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "support/world.h"

namespace xd::test {

// The lines that one rank reports, section by section.
class Sections {
 public:
  void begin(std::string name) { sections_.emplace_back(std::move(name), ""); }
  void line(const std::string& text) { sections_.back().second += text + "\n"; }

  const std::vector<std::pair<std::string, std::string>>& all() const { return sections_; }

 private:
  std::vector<std::pair<std::string, std::string>> sections_;
};

// Prints "=== name", then the lines of each rank in that section, in the order of ranks.
inline void print(const std::vector<Sections>& of_rank) {
  for (std::size_t i = 0; i < of_rank[0].all().size(); ++i) {
    std::printf("=== %s\n", of_rank[0].all()[i].first.c_str());
    for (const Sections& sections : of_rank) std::fputs(sections.all()[i].second.c_str(), stdout);
  }
}

// Runs `body` on every rank of a launch with --threads and prints the result; the exit code.
template <class Body>
int run_sections(Body&& body) {
  World world("cpu");
  std::vector<Sections> of_rank(static_cast<std::size_t>(world.num_ranks()));
  const auto failures =
      world.run([&](Rank& rank) { body(rank, of_rank[static_cast<std::size_t>(rank.rank)]); });
  for (const RankFailure& failure : failures) {
    std::fprintf(stderr, "rank %d: %s\n", failure.rank, failure.text.c_str());
  }
  if (!failures.empty()) return 1;
  print(of_rank);
  return 0;
}

}  // namespace xd::test
