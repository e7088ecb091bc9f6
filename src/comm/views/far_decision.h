// One decision of ranks on several machines: the next view, by ballots (single-decree Paxos) among
// the members of the one before.
//
// Each rank has a card with its vote and its part in the ballots, which it alone writes and all
// others see, some later than others and not each of its values, but never an older one after a
// newer one:
//
//   vote      what the rank says in a call; withdrawn when that ends without a view
//   promised  the highest ballot that the rank has heard of; it accepts none below
//   accepted  the highest ballot whose view it has accepted, and that view
//   latest    the latest view that it knows to be decided
//
// A rank whose votes are there, or that is late, begins a ballot that is higher than all it has
// seen. When a quorum has promised it, it proposes the view of the highest accepted ballot that
// these show, or else its own. A view is decided when a quorum has accepted it in one ballot. Any
// two quorums have a rank in common: more than half of the members, or half of them with the lowest
// one. So of two parts of the ranks that cannot reach each other, one at most decides.
#pragma once

#include <array>
#include <cstdint>
#include <type_traits>
#include <vector>

#include "comm/views/view.h"

namespace xd {

// A view, and whose votes it counts. A vote that is withdrawn may be in a ballot that others bring
// to its end later; the number of its call tells the rank that this view is not about its next one.
struct CountedView {
  View view;
  std::array<std::uint8_t, Members::kWords * 64> calls{};  // by member: the last bits of Vote::call
  bool operator==(const CountedView&) const = default;
};

struct Card {
  std::uint64_t serial = 0;                  // its values are numbered by its rank
  Vote vote;                                 // none between calls, unless the last one succeeded
  std::uint64_t number = 0;                  // of the view that the ballots are for
  std::uint64_t promised = 0, accepted = 0;  // round 48 bits, rank + 1 16 bits; 0 = none
  CountedView proposal;                      // of `accepted`
  CountedView latest;
  bool operator==(const Card&) const = default;
};
static_assert(std::has_unique_object_representations_v<Card>);

class FarDecision {
 public:
  // `card`: this rank's as it was left. `before`: the last view that this rank knows. A rank that
  // is no member of it asks to be taken in.
  FarDecision(int rank, int num_ranks, const View& before, const Card& card, const Vote& vote);

  // All that this rank knows of others now.
  struct Seen {
    const std::vector<Card>& cards;  // by rank; the own one is not looked at
    const Members& gone;             // take part in nothing any more
    bool late;                       // votes are waited for no more
    bool begin;                      // this rank may begin a ballot, also where one is under way
  };
  // Goes on as far as that allows. True: the card has changed, and others have to see it before the
  // next step.
  bool step(const Seen& seen);
  // Takes the vote back at the end of a call without an outcome. Promises and acceptances stay, as
  // others rely on them.
  void withdraw();

  const Card& card() const { return card_; }
  // As of NearDecision, but that the caller withdraws.
  Outcome outcome() const { return outcome_; }
  const View& view() const { return view_; }
  const Tally& tally() const { return tally_; }
  // True: this rank is a member, the votes are there, and the ranks have only to decide.
  bool is_voted() const { return voted_ && is_member(); }
  bool is_member() const { return view_.members.has(rank_); }

 private:
  void vote_again();
  void adopt(const CountedView& latest);
  void count(const Seen& seen);
  void answer(const Seen& seen);
  void lead(const Seen& seen);
  void close(const Seen& seen);
  CountedView proposal() const;
  bool is_quorum(const Members& ranks) const;
  const Card& card_of(int rank, const Seen& seen) const {
    return rank == rank_ ? card_ : seen.cards[at(rank)];
  }
  // Calls use(card) for each member's card that is about this number.
  template <class Use>
  void for_members(const Seen& seen, Use use) const {
    for (int r = 0; r < num_ranks_; ++r) {
      if (!view_.members.has(r)) continue;
      const Card& card = card_of(r, seen);
      if (card.number == view_.number + 1) use(r, card);
    }
  }

  int rank_;
  int num_ranks_;
  View view_;
  Card card_;
  Vote vote_;
  Tally tally_;
  // The ballot that this rank has begun and not yet proposed in; 0 = none.
  std::uint64_t leads_ = 0;
  bool voted_ = false;
  Outcome outcome_ = Outcome::none;
};

}  // namespace xd
