#include "comm/views/near_decision.h"

namespace xd {

NearDecision::NearDecision(int rank, int num_ranks, const View& before, const Vote& vote)
    : rank_(rank), num_ranks_(num_ranks), view_(before), vote_(vote), tally_(at(num_ranks)) {}

bool NearDecision::step(NearPlaces& places, bool late) {
  switch (next_) {
    case Next::publish:
      vote_.number = view_.number + 1;
      places.publish(vote_);
      next_ = Next::look;
      return true;
    case Next::look:
      look(places);
      return true;
    case Next::read:
      read(places, reading_);
      return ++reading_ < num_ranks_ || count(late);
    case Next::propose:
      places.propose(tally_.view(view_));
      next_ = Next::decide;
      return true;
    case Next::decide:
      places.decide(found_, DecisionWord(view_.number + 1, rank_));
      next_ = Next::look;  // finds this rank's decision, or that of another one
      return true;
    case Next::take:
      take(places);
      return true;
    case Next::withdraw:
      places.publish(Vote{});
      withdrawn_ = true;
      next_ = Next::look;
      return true;
    case Next::confirm:
      if (places.decide(found_, found_.with_withdrawal())) outcome_ = Outcome::outsider;
      next_ = Next::look;
      return true;
  }
  return false;
}

void NearDecision::look(NearPlaces& places) {
  found_ = places.decided();
  if (found_.number() > view_.number) {
    next_ = Next::take;
  } else if (withdrawn_) {
    next_ = Next::confirm;
  } else {
    tally_ = Tally(at(num_ranks_));
    reading_ = 0;
    next_ = Next::read;
  }
}

void NearDecision::read(NearPlaces& places, int rank) {
  // A rank's vote comes before its end. A vote of one that is gone would be no harm, but its ranks
  // would have to decide once more.
  if (rank != rank_ && places.is_gone(rank)) return tally_.gone.add(rank);
  const std::optional<Vote> vote = places.vote(rank);
  if (!vote || vote->number != view_.number + 1) return;
  tally_.voters.add(rank);
  tally_.votes[at(rank)] = *vote;
}

// Called when all votes have been read. False = this rank waits for others.
bool NearDecision::count(bool late) {
  const bool is_left_alone = view_.members.without(tally_.gone).count() == 0 && vote_.leave == 0;
  const bool may_propose = is_member() ? late || tally_.missing(view_).count() == 0 : is_left_alone;
  if (may_propose) {
    next_ = Next::propose;
    return true;
  }
  next_ = late ? Next::withdraw : Next::look;
  return late;
}

void NearDecision::take(NearPlaces& places) {
  const std::optional<View> view = places.proposal(found_);
  if (!view || view->number != found_.number()) {
    next_ = Next::look;  // the word has gone on
    return;
  }
  const bool was_member = is_member();
  view_ = *view;
  if (is_member()) {
    outcome_ = Outcome::member;
  } else if (was_member || withdrawn_) {
    outcome_ = Outcome::outsider;
  } else {
    next_ = Next::publish;  // to be taken into the next one
  }
}

}  // namespace xd
