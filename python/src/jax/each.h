// Makes the same blocking call for several ranks of this process, which wait for one another.
#pragma once

#include <cstddef>
#include <optional>
#include <thread>
#include <vector>

#include "problem.h"

namespace xdjax {

// Calls fn(i) -> std::optional<Problem> for every i below `count`, each on a thread of its own.
// Returns the problem to show, preferably a rank's own rather than one about its peers.
template <class Fn>
std::optional<Problem> for_each_rank(std::size_t count, Fn fn) {
  std::vector<std::optional<Problem>> problems(count);
  {
    std::vector<std::jthread> threads;
    threads.reserve(count);
    for (std::size_t i = 0; i < count; ++i) {
      threads.emplace_back([&, i] { problems[i] = fn(i); });
    }
  }
  std::optional<Problem> shown;
  for (std::optional<Problem>& problem : problems) {
    if (problem && (!shown || shown->status == XD_ERROR_MISMATCH)) shown = std::move(problem);
  }
  return shown;
}

}  // namespace xdjax
