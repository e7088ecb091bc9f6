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
  TurnLoss() {
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      comms_[at(rank)]->begin_group();
      toys_[at(rank)] = std::make_unique<toy::HostToy>(comms_[at(rank)]);
      toys_[at(rank)]->outlive_losses();
    }));
    for (std::uint64_t n = 0; n < 3; ++n) {
      expect_no_errors(on_threads(kRanks, [&](int rank) { toys_[at(rank)]->pass(n, kFactor); }));
    }
  }

  void hear_of_end(int rank) const {
    constexpr std::array kLost{kVictim};
    comms_[at(rank)]->errors().on_lost({.ranks = kLost});
  }
  std::uint64_t pass(int rank, std::uint64_t number) {
    return toys_[at(rank)]->pass(number + static_cast<std::uint64_t>(rank), kFactor);
  }
  // The error of a survivor's next operation.
  std::optional<Error> error_of_pass(int rank) {
    try {
      pass(rank, 100);
    } catch (const Error& error) {
      return error;
    }
    return {};
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
  const std::vector<std::shared_ptr<Comm>> comms_ = make_comms(kRanks, masking());
  std::vector<std::unique_ptr<toy::HostToy>> toys_{kRanks};
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

// The victim is a member of the view, and ends while it comes to it.
class ViewLossAt : public TurnLoss, public testing::WithParamInterface<std::tuple<int, int>> {};

TEST_P(ViewLossAt, IsMetByAllMembersAlike) {
  const auto [stores, first] = GetParam();
  std::atomic<bool> first_has_returned{false};
  Victim(*comms_[1], *toys_[1]).come_to_view(stores, 1);
  const auto errors = on_threads(kRanks, [&, stores = stores, first = first](int rank) {
    if (rank == kVictim) {
      hear_of_end(first);
      EXPECT_TRUE(eventually([&] { return stores > 0 || first_has_returned.load(); }));
      return hear_of_end(2 - first);
    }
    std::optional<Error> error;
    try {
      toys_[at(rank)]->enter_view(view_of(1, {0, 1, 2}));
    } catch (const Error& met) {
      error = met;
    }
    if (rank == first) first_has_returned = true;
    if (error) throw Error(*error);
  });
  for (const int rank : kSurvivors) {
    EXPECT_EQ(errors[at(rank)].has_value(), stores == 0) << "rank " << rank;
    if (stores == 0) expect_loss(errors[at(rank)]);
    expect_loss(error_of_pass(rank));
  }
  expect_to_go_on(2);
}

INSTANTIATE_TEST_SUITE_P(Stores, ViewLossAt,
                         testing::Combine(testing::Range(0, Victim::kViewStores + 1),
                                          testing::ValuesIn(kSurvivors)));

}  // namespace
}  // namespace xd::test
