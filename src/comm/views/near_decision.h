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

// The word: number 48 bits, proposer 16 bits.
class DecisionWord {
 public:
  DecisionWord() = default;
  explicit DecisionWord(std::uint64_t word) : word_(word) {}
  DecisionWord(std::uint64_t number, int proposer)
      : word_(number << 16 | static_cast<std::uint64_t>(proposer)) {}

  std::uint64_t word() const { return word_; }
  std::uint64_t number() const { return word_ >> 16; }
  int proposer() const { return static_cast<int>(word_ & 0xffff); }

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
  // Number and proposer of the decision that goes before: none may have come since.
  virtual void decide(DecisionWord before, DecisionWord next) = 0;

 protected:
  ~NearPlaces() = default;
};

class NearDecision {
 public:
  // `before`: the last view that this rank knows, and the word by which it was decided. A rank that
  // is no member of it asks to be taken in.
  NearDecision(int rank, int num_ranks, const View& before, DecisionWord before_word,
               const Vote& vote);

  // Makes one access to what ranks share. `late`: nothing is waited for any more. False = a rank
  // that has looked at everything waits for others, and may sleep before the next step.
  bool step(NearPlaces& places, bool late);

  // none = step() is to be called again. Behind a member's decision, or an outsider's, view() and
  // word() are those of the latest decision. An outsider that is late withdraws its vote.
  Outcome outcome() const { return outcome_; }
  const View& view() const { return view_; }
  DecisionWord word() const { return word_; }
  const Tally& tally() const { return tally_; }

 private:
  enum class Next { publish, look, read, propose, decide, take, withdraw, last_look };

  bool is_member() const { return view_.members.has(rank_); }
  void look(NearPlaces& places);
  void read(NearPlaces& places, int rank);
  bool count(bool late);
  void take(NearPlaces& places);

  int rank_;
  int num_ranks_;
  View view_;
  DecisionWord word_, found_;
  Vote vote_;
  Tally tally_;
  Next next_ = Next::publish;
  int reading_ = 0;
  bool withdrawn_ = false;
  Outcome outcome_ = Outcome::none;
};

}  // namespace xd
