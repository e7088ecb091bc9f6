// The greedy method of AETG (Cohen, Dalal, Fredman, Patton 1997): of several candidates take the
// one that covers most new pairs; a candidate starts with an uncovered pair and gets the remaining
// dimensions in random order, each with the value that covers most new pairs so far.
#include "conformance/pairwise.h"

#include <algorithm>
#include <numeric>
#include <set>

#include "support/random.h"

namespace xd::test {
namespace {

constexpr int kUnset = -1;
constexpr int kCandidates = 12;

struct Pair {
  int first_dimension, first, second_dimension, second;
  auto operator<=>(const Pair&) const = default;
};

Pair pair_of(int a_dimension, int a, int b_dimension, int b) {
  return a_dimension < b_dimension ? Pair{a_dimension, a, b_dimension, b}
                                   : Pair{b_dimension, b, a_dimension, a};
}

using Row = std::vector<int>;

class Cover {
 public:
  Cover(const std::vector<int>& sizes, std::uint64_t seed) : sizes_(sizes), random_(seed) {
    for (int a = 0; a < dimensions(); ++a) {
      for (int b = a + 1; b < dimensions(); ++b) {
        for (int i = 0; i < size(a); ++i) {
          for (int j = 0; j < size(b); ++j) open_.insert({a, i, b, j});
        }
      }
    }
  }

  bool complete() const { return open_.empty(); }

  Row next() {
    Row best = candidate();
    for (int i = 1; i < kCandidates; ++i) {
      Row other = candidate();
      if (pairs_covered(other) > pairs_covered(best)) best = std::move(other);
    }
    for (int a = 0; a < dimensions(); ++a) {
      for (int b = a + 1; b < dimensions(); ++b)
        open_.erase({a, value(best, a), b, value(best, b)});
    }
    return best;
  }

 private:
  int dimensions() const { return static_cast<int>(sizes_.size()); }
  int size(int dimension) const { return sizes_[static_cast<std::size_t>(dimension)]; }
  static int value(const Row& row, int dimension) {
    return row[static_cast<std::size_t>(dimension)];
  }

  Row candidate() {
    Row row(sizes_.size(), kUnset);
    const Pair& start = *std::next(
        open_.begin(),
        static_cast<std::ptrdiff_t>(random_.below(std::min<std::uint64_t>(open_.size(), 64))));
    row[static_cast<std::size_t>(start.first_dimension)] = start.first;
    row[static_cast<std::size_t>(start.second_dimension)] = start.second;
    std::vector<int> order(sizes_.size());
    std::iota(order.begin(), order.end(), 0);
    for (std::size_t i = 0; i + 1 < order.size(); ++i) {
      std::swap(order[i], order[i + random_.below(order.size() - i)]);
    }
    for (const int dimension : order) {
      if (value(row, dimension) == kUnset) {
        row[static_cast<std::size_t>(dimension)] = best_value(row, dimension);
      }
    }
    return row;
  }

  int best_value(const Row& row, int dimension) {
    const int first = static_cast<int>(random_.below(static_cast<std::uint64_t>(size(dimension))));
    int best = first;
    int best_gain = -1;
    for (int i = 0; i < size(dimension); ++i) {
      const int candidate = (first + i) % size(dimension);
      const int gain = new_pairs(row, dimension, candidate);
      if (gain > best_gain) {
        best = candidate;
        best_gain = gain;
      }
    }
    return best;
  }

  // Uncovered pairs of `candidate` with the dimensions that are set already.
  int new_pairs(const Row& row, int dimension, int candidate) const {
    int pairs = 0;
    for (int other = 0; other < dimensions(); ++other) {
      if (other == dimension || value(row, other) == kUnset) continue;
      pairs +=
          static_cast<int>(open_.count(pair_of(dimension, candidate, other, value(row, other))));
    }
    return pairs;
  }

  int pairs_covered(const Row& row) const {
    int twice = 0;
    for (int dimension = 0; dimension < dimensions(); ++dimension) {
      twice += new_pairs(row, dimension, value(row, dimension));
    }
    return twice / 2;
  }

  std::vector<int> sizes_;
  Random random_;
  std::set<Pair> open_;  // not covered yet
};

}  // namespace

std::vector<std::vector<int>> cover_pairs(const std::vector<int>& sizes, std::uint64_t seed) {
  Cover cover(sizes, seed);
  std::vector<Row> rows;
  while (!cover.complete()) rows.push_back(cover.next());
  return rows;
}

}  // namespace xd::test
