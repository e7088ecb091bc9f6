#include "comm/views/views.h"

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "base/error.h"
#include "base/math.h"

namespace xd {
namespace {

// Between machines ranks look so often for what others of their machine have said, and send that as
// well, since a relay may have ended with it, or stand still.
constexpr int kRepeatMs = 50;
// The time without news after which the second rank begins a ballot; the third waits twice as long.
constexpr int kBallotMs = 20;
// Between machines: the time for ballots when no more votes are waited for.
constexpr int kLeastBallotsMs = 1000, kMostBallotsMs = 10000;

}  // namespace

// The places of the near ranks, all of which are there.
class Views::SharedPlaces final : public NearPlaces {
 public:
  explicit SharedPlaces(Views& views) : views_(views), cards_(views.errors_.cards()) {}

  void publish(const Vote& vote) override {
    views_.card_.vote = vote;
    ++views_.card_.serial;
    cards_.publish(views_.card_);
  }
  std::optional<Vote> vote(int rank) override {
    const std::optional<Card> card = of(rank).card.read();
    return card ? std::optional(card->vote) : std::nullopt;
  }
  bool is_gone(int rank) override { return views_.errors_.lost(rank); }
  void propose(const View& view) override {
    of(views_.hosts_.self()).proposals[view.number % 2].write(view);
  }
  std::optional<View> proposal(DecisionWord word) override {
    // A damaged word names no rank that does not exist.
    if (word.proposer() >= views_.num_ranks()) return {};
    return of(word.proposer()).proposals[word.number() % 2].read();
  }
  DecisionWord decided() override { return DecisionWord(word().load(std::memory_order_acquire)); }
  bool decide(DecisionWord before, DecisionWord next) override {
    std::uint64_t expected = before.word();
    const bool is_first =
        word().compare_exchange_strong(expected, next.word(), std::memory_order_acq_rel);
    if (is_first) cards_.ring_peers();
    return is_first;
  }

 private:
  ViewPlaces& of(int rank) const { return cards_.places(*views_.hosts_.find_near(rank)); }
  std::atomic<std::uint64_t>& word() const { return of(0).decision; }

  Views& views_;
  Cards& cards_;
};

Views::Known Views::known() const {
  const std::lock_guard lock(mutex_);
  return {view_, before_};
}

Views::Known Views::give() {
  const std::lock_guard lock(mutex_);
  given_ = view_;
  return {view_, before_};
}

void Views::keep(const View& view) {
  const std::lock_guard lock(mutex_);
  if (view.number == view_.number) return;
  before_ = given_;
  view_ = view;
  is_alone_ = false;
}

View Views::basis() const { return is_alone_ ? View{} : view_; }

Views::Known Views::agree(const Vote& wish, int timeout_ms) {
  const std::unique_lock lock(deciding_, std::try_to_lock);
  if (!lock.owns_lock()) {
    fail(XD_ERROR_BUSY, "another thread of this rank is in this call, expected one at a time");
  }
  const bool was_member = basis().members.has(errors_.rank());
  if (!was_member && wish.leave != 0) return known();
  Vote vote = wish;
  vote.call = ++calls_;
  const Outcome outcome =
      hosts_.all_are_near() ? decide_near(vote, timeout_ms) : decide_far(vote, timeout_ms);
  const bool has_left = outcome == Outcome::outsider && vote.leave != 0;
  if (outcome != Outcome::member && !has_left) fail_outside(outcome, was_member, timeout_ms);
  return give();
}

Outcome Views::decide_near(const Vote& vote, int timeout_ms) {
  SharedPlaces places(*this);
  NearDecision decision(errors_.rank(), num_ranks(), basis(), vote);
  try {
    wait_near(decision, places, timeout_ms);
  } catch (...) {
    decision.withdraw();
    while (decision.outcome() == Outcome::none) decision.step(places, true);
    throw;
  }
  keep(decision.view());
  return decision.outcome();
}

void Views::wait_near(NearDecision& decision, NearPlaces& places, int timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  Interruption interruption;
  for (;;) {
    // The bell is read before the places: see Doorbell.
    const std::uint32_t rings = errors_.bell(hosts_.self()).value();
    const bool late = deadline.passed();
    while (decision.outcome() == Outcome::none && decision.step(places, late)) {
    }
    if (decision.outcome() != Outcome::none) return;
    sleep(rings, deadline, interruption);
  }
}

namespace {

// Voters in front of a rank that are members.
int place_of(int rank, const FarDecision& decision) {
  const Members voters = decision.tally().voters.common(decision.view().members);
  int place = 0;
  for (int r = 0; r < rank; ++r) place += voters.has(r) ? 1 : 0;
  return place;
}

// The time at which a rank begins a ballot, so that mostly one rank does. Each lets those in front
// of it begin earlier, and waits anew while something comes of that.
class BallotTime {
 public:
  // `place`: how many voters are in front of this rank.
  void count_from_now(int place) { begin_ = Deadline::after_ms(std::int64_t{kBallotMs} * place); }
  bool has_come() const { return begin_ && begin_->passed(); }
  Deadline before(const Deadline& other) const {
    return begin_ && begin_->when() < other.when() ? *begin_ : other;
  }
  bool is_set() const { return begin_.has_value(); }

 private:
  std::optional<Deadline> begin_;
};

}  // namespace

Outcome Views::decide_far(const Vote& vote, int timeout_ms) {
  FarDecision decision(errors_.rank(), num_ranks(), view_, card_, vote);
  const auto withdraw = [&] {
    decision.withdraw();
    publish(decision);
  };
  try {
    wait_far(decision, timeout_ms);
  } catch (...) {
    withdraw();
    throw;
  }
  if (decision.outcome() == Outcome::none) withdraw();
  missing_ = decision.tally().missing(decision.view());
  keep(decision.view());
  return decision.outcome();
}

void Views::publish(const FarDecision& decision) {
  card_ = decision.card();
  errors_.cards().publish(card_);
}

void Views::wait_far(FarDecision& decision, int timeout_ms) {
  const Deadline deadline = Deadline::after_ms(timeout_ms);
  const int ballots_ms = std::clamp(timeout_ms, kLeastBallotsMs, kMostBallotsMs);
  const Deadline end(deadline.when() + std::chrono::milliseconds(ballots_ms));
  const auto waits = [&] {
    return decision.outcome() == Outcome::none && !(decision.is_member() ? end : deadline).passed();
  };
  BallotTime ballot;
  Deadline repeat = Deadline::after_ms(kRepeatMs);
  Interruption interruption;
  publish(decision);
  while (waits()) {
    const std::uint32_t rings = errors_.bell(hosts_.self()).value();
    const Members absent = gone();
    const bool begins = ballot.has_come();
    const std::uint64_t number = decision.view().number;
    const bool has_changed =
        decision.step({errors_.cards().all(), absent, deadline.passed(), begins});
    if (has_changed) publish(decision);
    if (!decision.is_voted() || decision.view().number != number) ballot = {};
    if (has_changed) {
      if (ballot.is_set()) ballot.count_from_now(place_of(errors_.rank(), decision) + 1);
      continue;
    }
    if (decision.is_voted() && !ballot.is_set()) {
      ballot.count_from_now(place_of(errors_.rank(), decision));
      continue;
    }
    if (repeat.passed()) {
      errors_.cards().repeat();
      repeat = Deadline::after_ms(kRepeatMs);
    }
    const Deadline next = ballot.before(repeat);
    sleep(rings, deadline.passed() || next.when() < deadline.when() ? next : deadline,
          interruption);
  }
}

Members Views::gone() const {
  Members result;
  for (int r = 0; r < num_ranks(); ++r) {
    if (errors_.lost(r)) result.add(r);
  }
  return result;
}

// Until the bell has rung since `rings`. Throws the fatal error that ends the call.
void Views::sleep(std::uint32_t rings, const Deadline& until, Interruption& interruption) {
  errors_.throw_if_failed();
  errors_.bell(hosts_.self()).sleep(rings, interruption.next(until));
  if (!interruption.requested()) return;
  errors_.abort();
  errors_.throw_if_failed();
}

std::vector<int> Views::list(const Members& members) const {
  std::vector<int> result;
  for (int r = 0; r < num_ranks(); ++r) {
    if (members.has(r)) result.push_back(r);
  }
  return result;
}

void Views::fail_outside(Outcome outcome, bool was_member, int timeout_ms) const {
  const int rank = errors_.rank();
  const RankNames& names = errors_.names();
  const std::string latest =
      error_text("view ", view_.number, " has ", names.of(list(view_.members)));
  if (outcome == Outcome::none && view_.members.has(rank)) {
    throw Error(
        XD_ERROR_PEER_LOST,
        error_text(names.of(rank), " has reached too few members of view ", view_.number,
                   " to decide on the next one, expected more than half of ", view_.members.count(),
                   ", or half of them with ", names.of(view_.members.lowest()),
                   "; no vote has come from ", names.of(list(missing_))),
        rank);
  }
  if (was_member) {
    throw Error(XD_ERROR_PEER_LOST,
                error_text("the others have gone on without ", names.of(rank), ": ", latest), rank);
  }
  throw Error(XD_ERROR_PEER_LOST,
              error_text(names.of(rank), " has not been taken into a view within ", timeout_ms,
                         " ms: ", latest),
              rank);
}

}  // namespace xd
