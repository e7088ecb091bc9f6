// The names of ranks in error texts: where there are several hosts, a rank is named with its host.
#pragma once

#include <algorithm>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "base/math.h"
#include "base/rank_list.h"

namespace xd {

class RankNames {
 public:
  RankNames() = default;  // one host
  // `host_of` is by rank, `names` by host.
  RankNames(std::span<const int> host_of, std::vector<std::string> names)
      : host_of_(host_of.begin(), host_of.end()), names_(std::move(names)) {}

  // "rank 2", or where there are several hosts "rank 2 of host 1 (node7)".
  std::string of(int rank) const { return of({&rank, 1}); }
  // "ranks 0, 1 of host 0 (node6) and rank 2 of host 1 (node7)"
  std::string of(std::span<const int> ranks) const {
    if (names_.size() < 2) return rank_list(ranks);
    std::string text;
    for (int host = 0; host < static_cast<int>(names_.size()); ++host) {
      std::vector<int> here;
      std::ranges::copy_if(ranks, std::back_inserter(here),
                           [&](int rank) { return host_of(rank) == host; });
      if (here.empty()) continue;
      text += concat(text.empty() ? "" : " and ", rank_list(here), " of ", host_name(host));
    }
    return text.empty() ? rank_list(ranks) : text;
  }

 private:
  int host_of(int rank) const {
    return rank >= 0 && at(rank) < host_of_.size() ? host_of_[at(rank)] : -1;
  }
  std::string host_name(int host) const {
    return concat("host ", host, " (", names_[at(host)], ")");
  }

  std::vector<int> host_of_;
  std::vector<std::string> names_;
};

}  // namespace xd
