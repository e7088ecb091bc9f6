// Pairwise coverage: a small set of test cases in which every value of every dimension meets every
// value of every other dimension.
#pragma once

#include <cstdint>
#include <vector>

namespace xd::test {

// sizes[d] = number of values of dimension d. Each result[i][d] is in [0, sizes[d]).
std::vector<std::vector<int>> cover_pairs(const std::vector<int>& sizes, std::uint64_t seed);

}  // namespace xd::test
