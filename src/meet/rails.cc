#include "meet/rails.h"

#include <algorithm>

namespace xd {

Rails::Rails(int rank, std::span<const int> host_of)
    : rank_(rank),
      host_of_(host_of.begin(), host_of.end()),
      place_(host_of.size()),
      ranks_of_(at(std::ranges::max(host_of) + 1)) {
  for (int r = 0; r < num_ranks(); ++r) {
    std::vector<int>& ranks = ranks_of_[at(host_of_[at(r)])];
    place_[at(r)] = static_cast<int>(ranks.size());
    ranks.push_back(r);
  }
  for (int r = 0; r < num_ranks(); ++r) {
    const bool direct = r == rank_ || is_linked(r);
    source_of_.push_back(direct ? r : relay(this->host_of(rank_), r));
  }
}

bool Rails::are_linked(int a, int b) const {
  if (host_of(a) == host_of(b)) return true;
  const std::size_t smaller = std::min(ranks_of(host_of(a)).size(), ranks_of(host_of(b)).size());
  return at(place_[at(a)]) % smaller == at(place_[at(b)]) % smaller;
}

int Rails::relay(int host, int rank) const {
  const std::span<const int> ranks = ranks_of(host);
  const std::size_t smaller = std::min(ranks.size(), ranks_of(host_of(rank)).size());
  return ranks[at(place_[at(rank)]) % smaller];
}

std::vector<int> Rails::followers_of(int rank) const {
  if (!is_rail(rank) || relay(host_of(rank_), rank) != rank_) return {};
  std::vector<int> followers;
  for (const int near : ranks_of(host_of(rank_)))
    if (near != rank_ && !are_linked(near, rank)) followers.push_back(near);
  return followers;
}

}  // namespace xd
