// The whole layer once more on one rank: all tokens, all experts, plain loops, no Crossdock.
#pragma once

#include <string>
#include <vector>

#include "worker.h"

namespace demo {

struct Comparison {
  std::string what;
  double error = 0;    // largest difference, over the largest value that is expected
  double allowed = 0;  // 0: must be equal
  bool right() const { return error <= allowed; }
};

// What all ranks have computed in `step` against a computation from the same text and the same
// weights. On one rank, while the others wait at a barrier.
std::vector<Comparison> check_step(const Worker& worker, const Text& text, int step);

}  // namespace demo
