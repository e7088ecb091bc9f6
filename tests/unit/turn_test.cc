// Turns of a family that is not expert parallelism, over ranks that are threads.
#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "unit/comms.h"
#include "unit/toy_family.h"

namespace xd::test {
namespace {

constexpr int kRanks = 3;

class ToyTurns : public testing::Test {
 protected:
  void SetUp() override {
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      comms_[at(rank)]->begin_group();
      toys_[at(rank)] = std::make_unique<toy::HostToy>(comms_[at(rank)]);
    }));
  }

  // One turn on every rank, with the factor that factor(rank) gives.
  template <class Factor>
  std::vector<std::optional<Error>> turn(std::uint64_t number, Factor&& factor) {
    return on_threads(kRanks, [&](int rank) {
      toys_[at(rank)]->mailbox() = kPoison;
      comms_[at(rank)]->collective().barrier();
      received_[at(rank)] =
          toys_[at(rank)]->pass(number + static_cast<std::uint64_t>(rank), factor(rank));
    });
  }
  void expect_passed(std::uint64_t number, std::uint64_t factor) {
    for (int rank = 0; rank < kRanks; ++rank) {
      const auto lower = static_cast<std::uint64_t>((rank + kRanks - 1) % kRanks);
      EXPECT_EQ(received_[at(rank)], (number + lower) * factor) << "rank " << rank;
    }
  }

  static constexpr std::uint64_t kPoison = 0xA5A5A5A5A5A5A5A5;
  const std::vector<std::shared_ptr<Comm>> comms_ = make_comms(kRanks);
  std::vector<std::unique_ptr<toy::HostToy>> toys_{kRanks};
  std::vector<std::uint64_t> received_ = std::vector<std::uint64_t>(kRanks);
};

TEST_F(ToyTurns, PassNumbersOnForMoreTurnsThanThereAreSlots) {
  for (std::uint64_t n = 0; n < 20; ++n) {
    expect_no_errors(turn(10 * n, [](int) { return 2; }));
    expect_passed(10 * n, 2);
  }
}

TEST_F(ToyTurns, ThatDisagreeMoveNothingAndAreToldInTheFamilysWords) {
  const auto errors = turn(1, [](int rank) { return rank == 1 ? 3 : 2; });
  expect_error(errors[0], XD_ERROR_MISMATCH, "ranks disagree; rank 1: factor 3, here 2");
  expect_error(errors[1], XD_ERROR_MISMATCH,
               "ranks disagree; rank 0: factor 2, here 3; rank 2: factor 2, here 3");
  expect_error(errors[2], XD_ERROR_MISMATCH, "ranks disagree; rank 1: factor 3, here 2");
  for (const auto& toy : toys_) {
    EXPECT_EQ(toy->mailbox(), kPoison);
    EXPECT_EQ(*toy->watch(), 1u);
  }
  expect_no_errors(turn(5, [](int) { return 7; }));
  expect_passed(5, 7);
}

TEST_F(ToyTurns, ThatFailOnOneRankAreToldToThePeersAtOnce) {
  const auto errors = on_threads(kRanks, [&](int rank) {
    if (rank == 0) toys_[0]->join_failed(0, "the caller's mistake", nullptr);
    if (rank != 0) toys_[at(rank)]->pass(1, 2);
  });
  expect_error(errors[0], XD_ERROR_INVALID_ARGUMENT, "the caller's mistake");
  for (const int rank : {1, 2}) {
    expect_error(errors[at(rank)], XD_ERROR_MISMATCH,
                 "rank 0: its call failed with XD_ERROR_INVALID_ARGUMENT");
  }
  expect_no_errors(turn(5, [](int) { return 7; }));
  expect_passed(5, 7);
}

TEST_F(ToyTurns, OfAnUnknownOperationNameTheFamilysType) {
  const auto errors = on_threads(
      kRanks, [&](int rank) { toys_[at(rank)]->join_failed(rank == 0 ? 5 : 0, "", nullptr); });
  expect_error(errors[0], XD_ERROR_INVALID_ARGUMENT, "operation = 5, expected a toy operation");
}

}  // namespace
}  // namespace xd::test
