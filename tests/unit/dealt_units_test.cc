// All ways in which a desk that deals out units and hands that take tickets can play together: an
// exhaustive search over the order of their loads and stores. Mutants show what it would find.
#include "ep/bulk/cuda/remote/units.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <iostream>
#include <set>
#include <string>
#include <vector>

namespace xd::ep::cuda {
namespace {

constexpr std::uint32_t kAll = 5, kHands = 3;
using Few = DealtUnits<2, 2>;

enum class Mutant { none, reuses_early, counts_anew_late, takes_any_number, ends_early };

struct Place {
  std::uint64_t number;
  std::uint32_t done;
  bool open, fresh;  // the desk's: under work; not told to hands yet
  auto operator<=>(const Place&) const = default;
};
struct Hand {
  enum Doing : std::uint8_t { nothing, waits, works, counts, gone };
  Doing doing;
  std::uint32_t ticket;
  auto operator<=>(const Hand&) const = default;
};
struct State {
  std::array<Place, Few::kPlaces> places;
  std::array<Hand, kHands> hands;
  std::array<std::array<std::uint32_t, Few::kShares>, kAll> shares;  // how often each was done
  std::uint32_t tickets, handed_on, finished;
  bool over;
  auto operator<=>(const State&) const = default;
};

class Search {
 public:
  explicit Search(Mutant mutant) : mutant_(mutant) {}

  // Empty = every order ends well; else a mistake.
  std::string run() {
    add(State{});
    while (mistake_.empty() && !open_.empty()) {
      const State state = open_.back();
      open_.pop_back();
      bool moves = desk(state);
      for (std::uint32_t h = 0; h < kHands; ++h) moves |= hand(state, h);
      if (!moves && !ends_well(state)) mistake_ = "nobody can go on";
    }
    return mistake_;
  }
  std::size_t states() const { return seen_.size(); }

 private:
  bool add(const State& state) {
    if (seen_.insert(state).second) open_.push_back(state);
    return true;
  }
  bool ends_well(const State& state) {
    for (const Hand& hand : state.hands)
      if (hand.doing != Hand::gone) return false;
    for (const auto& unit : state.shares)
      for (const std::uint32_t times : unit)
        if (times != 1) return false;
    return true;
  }

  // Each step is one of the desk's stores.
  bool desk(const State& state) {
    bool moves = false;
    for (std::uint32_t p = 0; p < Few::kPlaces; ++p) {
      const Place& place = state.places[p];
      if (!place.open) continue;
      State next = state;
      if (place.fresh) {  // its `done` is stored before its number
        next.places[p].fresh = false;
        if (mutant_ == Mutant::counts_anew_late) {
          next.places[p].done = 0;
        } else {
          next.places[p].number = Few::number_of(Few::last_in(p, state.handed_on));
        }
        moves = add(next);
      } else if (place.done >= Few::kShares - (mutant_ == Mutant::reuses_early ? 1 : 0)) {
        next.places[p].open = false;
        ++next.finished;
        moves = add(next);
      }
    }
    Place place = state.places[Few::place_of(state.handed_on)];
    if (state.handed_on < kAll && !place.open) {
      State next = state;
      place.open = place.fresh = true;
      if (mutant_ == Mutant::counts_anew_late) {
        place.number = Few::number_of(state.handed_on);
      } else {
        place.done = 0;
      }
      next.places[Few::place_of(next.handed_on++)] = place;
      moves = add(next);
    }
    const std::uint32_t ended = mutant_ == Mutant::ends_early ? state.handed_on : state.finished;
    if (ended == kAll && !state.over) {
      State next = state;
      next.over = true;
      moves = add(next);
    }
    return moves;
  }

  bool hand(const State& state, std::uint32_t h) {
    State next = state;
    Hand& mine = next.hands[h];
    const std::uint32_t unit = Few::unit_of(mine.ticket);
    Place& place = next.places[Few::place_of(unit)];
    switch (mine.doing) {
      case Hand::nothing:
        mine = {Hand::waits, next.tickets++};
        return add(next);
      case Hand::waits: {
        const bool here = mutant_ == Mutant::takes_any_number
                              ? place.number != 0
                              : place.number == Few::number_of(unit);
        if (!here && !state.over) return false;
        mine.doing = here ? Hand::works : Hand::gone;
        return add(next);
      }
      case Hand::works:
        if (unit >= kAll || place.number != Few::number_of(unit)) {
          mistake_ = "a share is done of a unit that is not here";
          return true;
        }
        ++next.shares[unit][Few::share_of(mine.ticket)];
        mine.doing = Hand::counts;
        return add(next);
      case Hand::counts:
        ++place.done;
        mine = {Hand::nothing, 0};
        return add(next);
      case Hand::gone:
        return false;
    }
    return false;
  }

  const Mutant mutant_;
  std::set<State> seen_;
  std::vector<State> open_;
  std::string mistake_;
};

TEST(DealtUnits, AreDoneOnceInAnyOrder) {
  Search search(Mutant::none);
  EXPECT_EQ(search.run(), "");
  std::cout << search.states() << " states\n";
}

TEST(DealtUnits, WouldBeFoundWithMistakes) {
  for (const Mutant mutant : {Mutant::reuses_early, Mutant::counts_anew_late,
                              Mutant::takes_any_number, Mutant::ends_early}) {
    EXPECT_NE(Search(mutant).run(), "") << static_cast<int>(mutant);
  }
}

TEST(DealtUnits, HaveTheirNumbersByPlace) {
  using Real = DealtUnits<32, 16>;
  std::vector<std::uint32_t> last(Real::kPlaces);
  for (std::uint32_t unit = 0; unit < 200; ++unit) {
    last[Real::place_of(unit)] = unit;
    for (std::uint32_t place = 0; place <= std::min(unit, Real::kPlaces - 1); ++place)
      EXPECT_EQ(Real::last_in(place, unit + 1), last[place]) << unit;
    for (std::uint32_t share = 0; share < Real::kShares; ++share) {
      EXPECT_EQ(Real::unit_of(unit * Real::kShares + share), unit);
      EXPECT_EQ(Real::share_of(unit * Real::kShares + share), share);
    }
  }
}

}  // namespace
}  // namespace xd::ep::cuda
