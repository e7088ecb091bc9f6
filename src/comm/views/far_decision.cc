#include "comm/views/far_decision.h"

namespace xd {

FarDecision::FarDecision(int rank, int num_ranks, const View& before, const Card& card,
                         const Vote& vote)
    : rank_(rank),
      num_ranks_(num_ranks),
      view_(before),
      card_(card),
      vote_(vote),
      tally_(at(num_ranks)) {
  vote_again();
  ++card_.serial;
}

// Votes for the number behind the view. Promises of the same number stay, as ranks rely on them.
void FarDecision::vote_again() {
  vote_.number = view_.number + 1;
  if (card_.number != vote_.number) {
    card_.number = vote_.number;
    card_.promised = card_.accepted = 0;
    card_.proposal = {};
  }
  card_.vote = vote_;
  leads_ = 0;
  voted_ = false;
}

bool FarDecision::step(const Seen& seen) {
  const Card before = card_;
  const CountedView* latest = nullptr;
  for (int r = 0; r < num_ranks_; ++r) {
    const CountedView& theirs = card_of(r, seen).latest;
    const View& known = latest != nullptr ? latest->view : view_;
    if (theirs.view.number > known.number) latest = &theirs;
  }
  if (latest != nullptr) {
    adopt(CountedView(*latest));
  } else {
    count(seen);
    if (is_member()) {
      answer(seen);
      lead(seen);
      close(seen);
    }
  }
  if (card_ == before) return false;
  ++card_.serial;
  return true;
}

void FarDecision::adopt(const CountedView& latest) {
  const bool was_member = is_member();
  card_.latest = latest;
  view_ = latest.view;
  const bool is_own_call = latest.calls[at(rank_)] == static_cast<std::uint8_t>(vote_.call);
  if (is_member() && is_own_call) {
    outcome_ = Outcome::member;
  } else if (was_member && !is_member()) {
    outcome_ = Outcome::outsider;
  } else {
    vote_again();
  }
}

void FarDecision::count(const Seen& seen) {
  tally_ = Tally(at(num_ranks_));
  for (int r = 0; r < num_ranks_; ++r) {
    if (r != rank_ && seen.gone.has(r)) {
      tally_.gone.add(r);
    } else if (const Card& card = card_of(r, seen); card.vote.number == view_.number + 1) {
      tally_.voters.add(r);
      tally_.votes[at(r)] = card.vote;
    }
  }
  voted_ = seen.late || tally_.missing(view_).count() == 0;
}

// Accepts and promises what others have begun.
void FarDecision::answer(const Seen& seen) {
  for_members(seen, [&](int, const Card& card) {
    if (card.accepted < card_.promised || card.accepted <= card_.accepted) return;
    card_.promised = card_.accepted = card.accepted;
    card_.proposal = card.proposal;
  });
  for_members(seen, [&](int, const Card& card) {
    card_.promised = std::max(card_.promised, card.promised);
  });
}

// Begins a ballot, and proposes in it when it has been promised.
void FarDecision::lead(const Seen& seen) {
  if (seen.begin && voted_) {
    leads_ = card_.promised =
        ((card_.promised >> 16) + 1) << 16 | static_cast<std::uint64_t>(rank_ + 1);
  }
  if (leads_ == 0) return;
  if (card_.promised != leads_) {
    leads_ = 0;  // another one's is higher
    return;
  }
  Members promised;
  const Card* highest = nullptr;
  for_members(seen, [&](int r, const Card& card) {
    if (card.promised != leads_) return;
    promised.add(r);
    if (card.accepted > (highest != nullptr ? highest->accepted : 0)) highest = &card;
  });
  if (!is_quorum(promised)) return;
  card_.proposal = highest != nullptr ? CountedView(highest->proposal) : proposal();
  card_.accepted = leads_;
  leads_ = 0;
}

// Finds out whether a view is decided: one that a quorum has accepted in one ballot. It could only
// be the highest one that is seen, or one that this rank hears of later.
void FarDecision::close(const Seen& seen) {
  if (card_.accepted == 0) return;
  Members accepted;
  for_members(seen, [&](int r, const Card& card) {
    if (card.accepted == card_.accepted) accepted.add(r);
  });
  if (is_quorum(accepted)) adopt(CountedView(card_.proposal));
}

CountedView FarDecision::proposal() const {
  CountedView result{.view = tally_.view(view_)};
  for (std::size_t r = 0; r < tally_.votes.size(); ++r) {
    result.calls[r] = static_cast<std::uint8_t>(tally_.votes[r].call);
  }
  return result;
}

bool FarDecision::is_quorum(const Members& ranks) const {
  const int size = view_.members.count(), got = ranks.count();
  return 2 * got > size || (2 * got == size && ranks.has(view_.members.lowest()));
}

void FarDecision::withdraw() {
  card_.vote = {};
  ++card_.serial;
}

}  // namespace xd
