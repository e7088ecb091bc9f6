// Names of ranks in error texts.
#pragma once

#include <algorithm>
#include <span>
#include <string>

namespace xd {

// "rank 3", "ranks 1, 4, 5", and after sixteen of them "... and 20 more".
inline std::string rank_list(std::span<const int> ranks) {
  constexpr std::size_t kShown = 16;
  std::string text = ranks.size() == 1 ? "rank " : "ranks ";
  for (std::size_t i = 0; i < std::min(ranks.size(), kShown); ++i)
    text += (i == 0 ? "" : ", ") + std::to_string(ranks[i]);
  if (ranks.size() > kShown) text += " and " + std::to_string(ranks.size() - kShown) + " more";
  return text;
}

}  // namespace xd
