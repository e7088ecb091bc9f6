// A view: a number and the set of ranks that work together. The ranks decide the next one together,
// from what each says in its vote.
#pragma once

#include <crossdock/view.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "base/math.h"

namespace xd {

class Members {
 public:
  static constexpr std::size_t kWords = XD_VIEW_WORDS;
  using Words = std::array<std::uint64_t, kWords>;

  Members() = default;
  explicit Members(const Words& words) : words_(words) {}
  static Members all(int num_ranks) {
    Members result;
    for (int r = 0; r < num_ranks; ++r) result.add(r);
    return result;
  }

  static Members of(int rank) {
    Members result;
    result.add(rank);
    return result;
  }

  bool has(int rank) const { return (words_[at(rank) / 64] >> (rank % 64) & 1) != 0; }
  void add(int rank) { words_[at(rank) / 64] |= std::uint64_t{1} << (rank % 64); }
  void remove(int rank) { words_[at(rank) / 64] &= ~(std::uint64_t{1} << (rank % 64)); }
  int count() const {
    int result = 0;
    for (const std::uint64_t word : words_) result += std::popcount(word);
    return result;
  }
  int lowest() const {  // -1 = none
    for (std::size_t i = 0; i < kWords; ++i) {
      if (words_[i] != 0) return static_cast<int>(i) * 64 + std::countr_zero(words_[i]);
    }
    return -1;
  }
  Members common(const Members& others) const { return without(without(others)); }
  Members without(const Members& others) const {
    Members result = *this;
    for (std::size_t i = 0; i < kWords; ++i) result.words_[i] &= ~others.words_[i];
    return result;
  }
  void add(const Members& others) {
    for (std::size_t i = 0; i < kWords; ++i) words_[i] |= others.words_[i];
  }
  const Words& words() const { return words_; }
  bool operator==(const Members&) const = default;

 private:
  Words words_{};
};

// A rank's say in the next view.
struct Vote {
  std::uint64_t number = 0;  // of the view that it is for; 0 = there is no vote
  std::uint64_t call = 0;    // the calls of a rank are counted
  std::int64_t step = 0;
  std::int32_t ok = 1;
  std::int32_t leave = 0;  // 1 = the rank itself wants to be no member
  Members leave_out;       // ranks that the voter wants to be no members
  bool operator==(const Vote&) const = default;
};

struct View {
  std::uint64_t number = 0;
  Members members;
  std::int64_t first_step = 0, last_step = 0;  // the lowest and the highest that count
  std::int64_t all_ok = 1;
  bool operator==(const View&) const = default;
};
static_assert(std::has_unique_object_representations_v<Vote> &&
              std::has_unique_object_representations_v<View>);

// The votes that a rank has found for the view behind `before`.
struct Tally {
  explicit Tally(std::size_t num_ranks) : votes(num_ranks) {}

  std::vector<Vote> votes;  // by rank; of those in `voters`
  Members voters;
  Members gone;  // ranks that take part in nothing any more

  // Members whose votes may still come.
  Members missing(const View& before) const { return before.members.without(voters).without(gone); }
  // The view that the votes make: all voters that live, but for those that leave or are left out by
  // a member of `before` that stays. These name others in ascending order, and a rank that a lower
  // one has named has no say. Guests have none either: steps and agreement are those of members of
  // `before`, unless none of them is left.
  View view(const View& before) const;
};

// The end of a rank's vote.
enum class Outcome {
  none,      // not decided yet
  member,    // the rank is a member of the view
  outsider,  // others have decided on a view without it
};

}  // namespace xd
