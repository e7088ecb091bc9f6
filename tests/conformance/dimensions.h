// Cases that are made from tables of values. A case type has
//   for_each_dimension(case, visit)
// in its source file and namespace, which calls visit(field, table) for every dimension, always in
// the same order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace xd::test {

// Rows of value numbers, one per dimension: all pairs of values, then random samples. `pairs` and
// `samples` are the seeds of either part.
struct Samples {
  std::uint64_t pairs, samples;
  int count;
};
std::vector<std::vector<int>> value_rows(const std::vector<int>& sizes, const Samples& how);

// XD_TEST_SEED, else 1.
std::uint64_t test_seed();
// XD_TEST_FULL=1: many more cases.
bool full_tests();

template <class Case>
std::vector<int> dimension_sizes() {
  Case unused;
  std::vector<int> sizes;
  for_each_dimension(unused, [&](const auto&, const auto& table) {
    sizes.push_back(static_cast<int>(std::size(table)));
  });
  return sizes;
}

template <class Case>
void set_values(Case& c, const std::vector<int>& row) {
  std::size_t dimension = 0;
  for_each_dimension(c, [&](auto& field, const auto& table) {
    field = table[static_cast<std::size_t>(row[dimension++])];
  });
}

}  // namespace xd::test
