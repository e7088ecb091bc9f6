#include <algorithm>

#include "base/error.h"
#include "base/math.h"
#include "net/fabric/fabric.h"

namespace xd::net {

// Every rank sees all lists, so all find the same answer.
std::string agree_on_provider(std::span<const std::vector<std::string>> of_ranks) {
  XD_CHECK(!of_ranks.empty());
  for (const std::string& provider : of_ranks[0]) {
    const bool everywhere = std::ranges::all_of(of_ranks, [&](const auto& providers) {
      return std::ranges::find(providers, provider) != providers.end();
    });
    if (everywhere) return provider;
  }
  std::string table;
  for (std::size_t rank = 0; rank < of_ranks.size(); ++rank) {
    table += concat(rank > 0 ? "; rank " : "rank ", rank, ":");
    for (const std::string& provider : of_ranks[rank]) table += " " + provider;
    if (of_ranks[rank].empty()) table += " none";
  }
  fail(XD_ERROR_MISMATCH, "no provider of libfabric is on all ranks: ", table);
}

}  // namespace xd::net
