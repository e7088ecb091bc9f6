// One decision of ranks that share memory: the next view, by one compare-and-swap.
//
// Each rank has a place for its vote and two for views that it proposes, in memory that outlives
// it; all share the word of the decision:
//
//   voter     vote (whole or none) -> ring
//   proposer  view at place number % 2 -> word: compare-and-swap {n, ..} to {n + 1, proposer}
//             (release) -> ring
//   reader    word (acquire) -> the proposer's view, which is whole and of that number, or the word
//             has gone on
//   guest     waits no more: no vote -> word: compare-and-swap {n, w, ..} to {n, w + 1, ..}. A
//             proposer that has read its vote before that fails, and reads the votes again
//
// A proposer overwrites a place only when it has seen the next number decided, so the view of the
// latest number is always there. A rank that dies anywhere leaves a vote or none, a decision or
// none. The word tells a view's number, so a rank that lags by more than one view has been left
// out: a member of each view in between has voted for its number.
#pragma once

#include <cstdint>
#include <optional>

#include "comm/views/view.h"

namespace xd {

// The word: number 38 bits, votes withdrawn since its decision 16 bits, proposer 10 bits.
class DecisionWord {
 public:
  DecisionWord() = default;
  explicit DecisionWord(std::uint64_t word) : word_(word) {}
  DecisionWord(std::uint64_t number, int proposer)
      : word_(number << 26 | static_cast<std::uint64_t>(proposer)) {}

  std::uint64_t word() const { return word_; }
  std::uint64_t number() const { return word_ >> 26; }
  int proposer() const { return static_cast<int>(word_ & 0x3ff); }
  // The same decision, with one more vote withdrawn. Their number begins anew some time.
  DecisionWord with_withdrawal() const {
    constexpr std::uint64_t kCount = std::uint64_t{0xffff} << 10;
    return DecisionWord((word_ & ~kCount) | ((word_ + (1U << 10)) & kCount));
  }

 private:
  std::uint64_t word_ = 0;
};

// The shared places, as one rank reaches them.
class NearPlaces {
 public:
  virtual void publish(const Vote& vote) = 0;              // this rank's
  virtual std::optional<Vote> vote(int rank) = 0;          // none = being written
  virtual bool is_gone(int rank) = 0;                      // it takes part in nothing any more
  virtual void propose(const View& view) = 0;              // this rank's place of that number
  virtual std::optional<View> proposal(DecisionWord) = 0;  // none = being written
  virtual DecisionWord decided() = 0;
  // False: the word is not `before` any more, and stays.
  virtual bool decide(DecisionWord before, DecisionWord next) = 0;

 protected:
  ~NearPlaces() = default;
};

class NearDecision {
 public:
  // `before`: the last view that this rank knows. A rank that is no member of it asks to be taken
  // in, and decides itself when all members are gone.
  NearDecision(int rank, int num_ranks, const View& before, const Vote& vote);

  // Makes one access to what ranks share. `late`: nothing is waited for any more. False = a rank
  // that has looked at everything waits for others, and may sleep before the next step.
  bool step(NearPlaces& places, bool late);
  // From now on this rank takes its vote back, unless it has been counted already.
  void withdraw() { next_ = Next::withdraw; }

  // none = step() is to be called again. Behind a member's decision, or an outsider's, view() is
  // that of the latest decision. A guest that is late withdraws its vote.
  Outcome outcome() const { return outcome_; }
  const View& view() const { return view_; }
  const Tally& tally() const { return tally_; }

 private:
  enum class Next { publish, look, read, propose, decide, take, withdraw, confirm };

  bool is_member() const { return view_.members.has(rank_); }
  void look(NearPlaces& places);
  void read(NearPlaces& places, int rank);
  bool count(bool late);
  void take(NearPlaces& places);

  int rank_;
  int num_ranks_;
  View view_;
  DecisionWord found_;
  Vote vote_;
  Tally tally_;
  Next next_ = Next::publish;
  int reading_ = 0;
  bool withdrawn_ = false;
  Outcome outcome_ = Outcome::none;
};

}  // namespace xd
