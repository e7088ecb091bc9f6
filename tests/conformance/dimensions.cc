#include "conformance/dimensions.h"

#include <cstdlib>
#include <string_view>

#include "conformance/pairwise.h"
#include "support/random.h"

namespace xd::test {

std::vector<std::vector<int>> value_rows(const std::vector<int>& sizes, const Samples& how) {
  std::vector<std::vector<int>> rows = cover_pairs(sizes, how.pairs);
  Random random(how.samples);
  for (int i = 0; i < how.count; ++i) {
    std::vector<int>& row = rows.emplace_back();
    for (const int size : sizes) {
      row.push_back(static_cast<int>(random.below(static_cast<std::uint64_t>(size))));
    }
  }
  return rows;
}

std::uint64_t test_seed() {
  const char* value = std::getenv("XD_TEST_SEED");
  return value ? std::strtoull(value, nullptr, 0) : 1;
}

bool full_tests() {
  const char* value = std::getenv("XD_TEST_FULL");
  return value && std::string_view(value) == "1";
}

}  // namespace xd::test
