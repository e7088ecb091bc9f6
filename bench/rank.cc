#include "rank.h"

#include <algorithm>

namespace bench {

void Rank::broadcast(std::span<std::byte> bytes) const {
  const std::vector<std::byte> first = gather(std::vector(bytes.begin(), bytes.end())).front();
  std::copy(first.begin(), first.end(), bytes.begin());
}

std::vector<double> Rank::slowest(const std::vector<double>& mine) const {
  const std::vector<std::vector<double>> of_rank = gather(mine);
  std::vector<double> most(rank == 0 ? mine.size() : 0);
  for (std::size_t i = 0; i < most.size(); ++i) {
    for (const std::vector<double>& one : of_rank) most[i] = std::max(most[i], one[i]);
  }
  return most;
}

bool Rank::all(bool mine) const {
  const std::vector<std::vector<char>> of_rank = gather(std::vector<char>{mine ? '\1' : '\0'});
  return std::ranges::all_of(of_rank, [](const auto& one) { return one.front() != 0; });
}

}  // namespace bench
