// Turns that outlive the end of a rank, at each of the rank's stores: the ranks that are left agree
// on the operations that have ended well, in whatever order they hear of the end, and go on.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "unit/comms.h"
#include "unit/toy_family.h"

namespace xd::test {
namespace {

constexpr int kRanks = 3, kVictim = 1;
constexpr std::array kSurvivors{0, 2};
constexpr std::uint64_t kFactor = 3;

// The stores of a rank that ends, one by one.
class Victim : private turn::HostCells<toy::Record> {
 public:
  Victim(Comm& comm, const toy::HostToy& toy)
      : HostCells(comm, toy.number(), toy.map().turn, toy.areas(), turn::kStages),
        toy_(toy),
        epoch_(toy.epoch() + 1) {}

  // An operation: an entry for each peer, the next rank's number, a done flag for each peer.
  static constexpr int kEntries = 2, kMoves = 1, kStores = 5;
  void operate(int stores, std::uint64_t number) {
    toy::Record record;
    record.factor = kFactor;
    record.mailbox = turn::PeerAddress::shared(toy_.map().mailbox);
    for (int i = 0; i < stores; ++i) {
      if (i < kEntries) {
        post_entry(peer(i), epoch_, record);
      } else if (i == kEntries) {
        await_entries();
        *toy_.areas().of(peer(0)).from(toy_.map().mailbox).array<std::uint64_t>() =
            number * kFactor;
      } else {
        post_done(peer(i - kEntries - kMoves), epoch_);
      }
      ring_peers();
    }
  }
  // An operation that it breaks: an entry for each peer, a done flag for each that says so.
  void break_off(int stores) {
    const int others = static_cast<int>(peers().size());
    for (int i = 0; i < stores; ++i) {
      if (i < others) {
        post_entry(peer(i), epoch_, toy::Record{});
      } else {
        post_done(peer(i - others), epoch_ | turn::kBroken);
      }
      ring_peers();
    }
  }
  // The words of a view: one for each peer.
  static constexpr int kViewStores = 2;
  void come_to_view(int stores, std::uint64_t number) {
    for (int i = 0; i < stores; ++i) {
      const NearMemory cell =
          toy_.areas().of(peer(i)).from(toy_.map().views + at(kVictim) * sizeof(turn::ViewCell));
      *cell.from(offsetof(turn::ViewCell, epoch)).array<std::uint64_t>() = epoch_ - 1;
      cell.from(offsetof(turn::ViewCell, number)).signal(number + 1);
      ring_peers();
    }
  }

 private:
  NearRank peer(int i) const { return peers()[at(i)]; }
  void await_entries() const {
    for (const NearRank other : peers()) {
      EXPECT_TRUE(eventually([&] { return entered(other, epoch_) == epoch_; }));
    }
  }

  const toy::HostToy& toy_;
  const std::uint64_t epoch_;
};

View view_of(std::uint64_t number, std::initializer_list<int> ranks) {
  View view;
  view.number = number;
  for (const int rank : ranks) view.members.add(rank);
  return view;
}

class TurnLoss : public testing::Test {
 protected:
  explicit TurnLoss(int ranks = kRanks) : comms_(make_comms(ranks, masking())), toys_(at(ranks)) {
    expect_no_errors(on_threads(ranks, [&](int rank) {
      comms_[at(rank)]->begin_group();
      toys_[at(rank)] = std::make_unique<toy::HostToy>(comms_[at(rank)]);
      toys_[at(rank)]->outlive_losses();
    }));
    for (std::uint64_t n = 0; n < 3; ++n) {
      expect_no_errors(on_threads(ranks, [&](int rank) { toys_[at(rank)]->pass(n, kFactor); }));
    }
  }

  void hear_of_end(int rank, int victim = kVictim) const {
    const std::array lost{victim};
    comms_[at(rank)]->errors().on_lost({.ranks = lost});
  }
  std::uint64_t pass(int rank, std::uint64_t number) {
    return toys_[at(rank)]->pass(number + static_cast<std::uint64_t>(rank), kFactor);
  }
  template <class Call>
  static std::optional<Error> error_of(Call&& call) {
    try {
      call();
    } catch (const Error& error) {
      return error;
    }
    return {};
  }
  // The error of a survivor's next operation.
  std::optional<Error> error_of_pass(int rank) {
    return error_of([&] { pass(rank, 100); });
  }
  // The error of its call by which it enters a view of all.
  std::optional<Error> error_of_view(int rank, std::uint64_t number) {
    return error_of([&] { toys_[at(rank)]->enter_view(view_of(number, {0, 1, 2})); });
  }
  void expect_loss(const std::optional<Error>& error) const {
    expect_error(error, XD_ERROR_PEER_LOST, "rank 1 has been lost");
  }
  // Both go on without the victim, in step, from the later epoch of the two.
  void expect_to_go_on(std::uint64_t view) {
    const std::uint64_t epoch = std::max(toys_[0]->epoch(), toys_[2]->epoch());
    std::array<std::uint64_t, kRanks> received{};
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      if (rank == kVictim) return;
      toys_[at(rank)]->enter_view(view_of(view, {0, 2}));
      EXPECT_EQ(toys_[at(rank)]->epoch(), epoch);
      for (std::uint64_t n = 0; n < 5; ++n) {
        received[at(rank)] = pass(rank, 10 * n);
        EXPECT_EQ(received[at(rank)], (10 * n + 2 - static_cast<std::uint64_t>(rank)) * kFactor);
      }
    }));
    for (const int rank : kSurvivors) {
      EXPECT_EQ(comms_[at(rank)]->errors().fatal_error(), nullptr);
    }
  }

  static xd_comm_config masking() {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.on_peer_loss = XD_COMM_PEER_LOSS_MASK;
    return config;
  }
  const std::vector<std::shared_ptr<Comm>> comms_;
  std::vector<std::unique_ptr<toy::HostToy>> toys_;
};

// How many stores of an operation the victim makes, and the rank that hears of its end first: the
// other one does when the first has returned.
class TurnLossAt : public TurnLoss, public testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(TurnLossAt, EndsTheSameOperationOnAllThatAreLeft) {
  const auto [stores, first] = GetParam();
  // A rank that has left one done flag has done its part for all.
  const bool has_done = stores > Victim::kEntries + Victim::kMoves;
  // Rank 2 alone has the victim's entry: it has moved rows, and waits until rank 0 gives up.
  const bool waits_for_other = stores == 1 && first == 2;
  std::atomic<bool> died{false}, first_has_returned{false};
  const auto errors = on_threads(kRanks + 1, [&, stores = stores, first = first](int rank) {
    if (rank == kVictim) {
      Victim(*comms_[1], *toys_[1]).operate(stores, 101);
      died = true;
    } else if (rank == kRanks) {
      EXPECT_TRUE(eventually([&] { return died.load(); }));
      hear_of_end(first);
      EXPECT_TRUE(eventually([&] { return waits_for_other || first_has_returned.load(); }));
      hear_of_end(2 - first);
    } else {
      if (has_done) {
        EXPECT_EQ(pass(rank, 100), (rank == 2 ? 101 : 102) * kFactor);
      }
      const std::optional<Error> error = error_of_pass(rank);
      if (rank == first) first_has_returned = true;
      if (error) throw Error(*error);
    }
  });
  EXPECT_FALSE(errors[kRanks]);
  for (const int rank : kSurvivors) {
    expect_loss(errors[at(rank)]);
    expect_loss(error_of_pass(rank));  // at once, without a turn
    EXPECT_EQ(toys_[at(rank)]->epoch(), has_done ? 5U : 4U);
  }
  expect_to_go_on(1);
}

INSTANTIATE_TEST_SUITE_P(Stores, TurnLossAt,
                         testing::Combine(testing::Range(0, Victim::kStores + 1),
                                          testing::ValuesIn(kSurvivors)));

// A rank that comes late to the operation may find the entries of all others there.
TEST_F(TurnLoss, IsNotWaitedForByARankThatMovesNothingLater) {
  Victim(*comms_[1], *toys_[1]).operate(Victim::kEntries, 101);
  hear_of_end(0);
  expect_loss(error_of_pass(0));
  constexpr std::uint64_t kPoison = 0xA5A5A5A5A5A5A5A5;
  toys_[0]->mailbox() = kPoison;  // this rank's own again
  hear_of_end(2);
  expect_loss(error_of_pass(2));
  EXPECT_EQ(toys_[0]->mailbox(), kPoison);
  expect_to_go_on(1);
}

TEST_F(TurnLoss, NeedsNoOperationOfARankThatKnowsOtherwise) {
  hear_of_end(0);
  expect_loss(error_of_pass(0));
  hear_of_end(2);
  EXPECT_EQ(toys_[2]->epoch() + 1, toys_[0]->epoch());
  expect_to_go_on(1);
}

// A second victim breaks the operation by the loss of the first one, and ends while it says so: how
// many stores it has made, the survivor that hears of both ends first, and of which one first.
class SecondLossAt : public TurnLoss,
                     public testing::WithParamInterface<std::tuple<int, int, bool>> {
 protected:
  static constexpr int kSecond = 3;
  SecondLossAt() : TurnLoss(kRanks + 1) {}

  void hear_of_both(int rank, bool second_first) const {
    for (const bool of_second : {second_first, !second_first})
      hear_of_end(rank, of_second ? kSecond : kVictim);
  }
};

TEST_P(SecondLossAt, EndsTheSameOperationOnAllThatAreLeft) {
  const auto [stores, first, second_first] = GetParam();
  std::atomic<bool> died{false}, first_has_returned{false};
  const auto errors = on_threads(
      kRanks + 2, [&, stores = stores, first = first, second_first = second_first](int rank) {
        if (rank == kVictim) return;  // has made no store
        if (rank == kSecond) {
          Victim(*comms_[kSecond], *toys_[kSecond]).break_off(stores);
          died = true;
        } else if (rank > kSecond) {
          EXPECT_TRUE(eventually([&] { return died.load(); }));
          hear_of_both(first, second_first);
          EXPECT_TRUE(eventually([&] { return first_has_returned.load(); }));
          hear_of_both(2 - first, second_first);
        } else {
          const std::optional<Error> error = error_of_pass(rank);
          if (rank == first) first_has_returned = true;
          if (error) throw Error(*error);
        }
      });
  for (const int rank : kSurvivors) {
    expect_error(errors[at(rank)], XD_ERROR_PEER_LOST, "has been lost");
    EXPECT_EQ(toys_[at(rank)]->epoch(), 4U);
  }
  expect_to_go_on(1);
}

INSTANTIATE_TEST_SUITE_P(Stores, SecondLossAt,
                         testing::Combine(testing::Range(0, 2 * kRanks + 1),
                                          testing::ValuesIn(kSurvivors), testing::Bool()));

// The victim is a member of the view, and ends while it comes to it.
class ViewLossAt : public TurnLoss, public testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(ViewLossAt, IsMetByAllMembersAtTheLatestInTheirNextOperation) {
  const auto [stores, first] = GetParam();
  std::atomic<bool> first_has_returned{false};
  Victim(*comms_[1], *toys_[1]).come_to_view(stores, 1);
  const auto errors = on_threads(kRanks, [&, stores = stores, first = first](int rank) {
    if (rank == kVictim) {
      hear_of_end(first);
      EXPECT_TRUE(eventually([&] { return stores > 0 || first_has_returned.load(); }));
      return hear_of_end(2 - first);
    }
    const std::optional<Error> error = error_of_view(rank, 1);
    if (rank == first) first_has_returned = true;
    if (error) throw Error(*error);
  });
  for (const int rank : kSurvivors) {
    // If the victim has left its word, this follows from the order in which ranks come and hear.
    if (stores == 0 || errors[at(rank)]) expect_loss(errors[at(rank)]);
    expect_loss(error_of_pass(rank));
  }
  expect_to_go_on(2);
}

TEST_F(TurnLoss, OfAMemberIsMetBehindTheViewOnceAllHaveCome) {
  Victim(*comms_[1], *toys_[1]).come_to_view(1, 1);
  expect_no_errors(on_threads(kRanks, [&](int rank) {
    if (rank != kVictim) toys_[at(rank)]->enter_view(view_of(1, {0, 1, 2}));
  }));
  for (const int rank : kSurvivors) {
    hear_of_end(rank);
    expect_loss(error_of_pass(rank));
  }
  expect_to_go_on(2);
}

// The other survivor has heard of the end elsewhere, and agrees on the next view instead: it comes
// to this one when the first has given it up, or never.
TEST_P(ViewLossAt, EndsTheWaitForAMemberThatAgreesAnew) {
  const auto [stores, first] = GetParam();
  const int other = 2 - first;
  Victim(*comms_[1], *toys_[1]).come_to_view(stores, 1);
  for (const int rank : kSurvivors) hear_of_end(rank);
  expect_loss(error_of_view(first, 1));
  expect_loss(error_of_pass(first));
  // All words are there, if the victim has left its own.
  const std::optional<Error> late = error_of_view(other, 1);
  EXPECT_EQ(late.has_value(), stores == 0);
  if (late) expect_loss(late);
  expect_loss(error_of_pass(other));
  expect_to_go_on(2);
}

// The same while a rank that is no member has yet to end.
TEST_P(ViewLossAt, EndsTheWaitForARankThatIsLeftOut) {
  const auto [stores, first] = GetParam();
  Victim(*comms_[1], *toys_[1]).come_to_view(stores, 1);
  hear_of_end(first);
  expect_loss(error_of([&, first = first] {
    toys_[at(first)]->enter_view(view_of(1, {first, kVictim}));
  }));
  hear_of_end(2 - first);
  expect_to_go_on(2);
}

INSTANTIATE_TEST_SUITE_P(Stores, ViewLossAt,
                         testing::Combine(testing::Range(0, Victim::kViewStores + 1),
                                          testing::ValuesIn(kSurvivors)));

}  // namespace
}  // namespace xd::test
