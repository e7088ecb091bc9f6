// The hosts that the ranks of a test name.
#pragma once

#include <string>
#include <utility>
#include <vector>

namespace xd::test {

// The number of each rank's host; empty = no rank names its host.
using Hosts = std::vector<int>;

inline std::string host_name(int host) { return "host-" + std::to_string(host); }

// The ranks of every host, ascending; hosts come by their lowest ranks.
using HostRanks = std::vector<std::vector<int>>;

inline HostRanks ranks_by_host(const Hosts& hosts, int num_ranks) {
  std::vector<std::pair<int, std::vector<int>>> found;
  for (int rank = 0; rank < num_ranks; ++rank) {
    const int host = hosts.empty() ? 0 : hosts[static_cast<std::size_t>(rank)];
    std::size_t i = 0;
    while (i < found.size() && found[i].first != host) ++i;
    if (i == found.size()) found.push_back({host, {}});
    found[i].second.push_back(rank);
  }
  HostRanks result;
  for (auto& [host, ranks] : found) result.push_back(std::move(ranks));
  return result;
}

}  // namespace xd::test
