// Times steps on all ranks between namespaces, and prints a line of JSON for each.
#pragma once

#include <functional>
#include <string>

#include "net/rank_results.h"

namespace bench::net {

// The amounts that a step has sent, over the ranks and as far as the program counts them.
struct Sent {
  double puts = 0, bytes = 0;
  double wire = 0;  // of the host's interface; of one rank of each host, 0 of the others
};

class Measure {
 public:
  Measure(RankResults& rank_results, int iters, int warmup);

  // Collective. Rank 0 prints {"step", "seconds": by iteration, the maximum over the ranks, "cpu":
  // seconds of processor by iteration, the sum over the ranks, "puts", "bytes", "wire": per
  // iteration, the sums over the ranks}. `sent` gives what this rank has sent so far.
  void step(
      const std::string& name, const std::function<void()>& body,
      const std::function<Sent()>& sent = [] { return Sent{}; });

 private:
  void print(const std::string& name) const;

  RankResults& rank_results_;
  const int iters_, warmup_;
};

}  // namespace bench::net
