// Turns of the toy family between kernels. Ranks are threads that share device 0.
#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstring>
#include <memory>
#include <vector>

#include "base/deadline.h"
#include "comm/feature.h"
#include "cuda/device.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "turn/disagreement.h"
#include "unit/comms.h"
#include "unit/toy_kernel.h"

namespace xd::test {
namespace {

constexpr int kRanks = 2, kDevice = 0;
constexpr std::uint64_t kPoison = 0xA5A5A5A5A5A5A5A5;

// One rank's part of the toy on its device.
class CudaToy {
 public:
  // Collective, and called after Comm::begin_group().
  explicit CudaToy(std::shared_ptr<Comm> comm)
      : comm_(std::move(comm)),
        map_(toy::Map::make(kRanks)),
        segments_(comm_->share(CollectiveCall{"toy_create"}, map_.end)),
        control_(kDevice, sizeof(toy::Control), "a toy's control block"),
        areas_(kDevice, kRanks * sizeof(HeapRange), "a toy's table"),
        report_(kDevice, sizeof(toy::Report)),
        copied_(kDevice, sizeof(std::uint64_t)) {
    const cuda::DeviceGuard guard(kDevice);
    toy::load_kernel();
    std::array<HeapRange, kRanks> areas{};
    for (int r = 0; r < kRanks; ++r) {
      areas[at(r)] = {segments_[at(r)]->base(), segments_[at(r)]->bytes()};
    }
    areas_.write(0, areas.data(), sizeof(areas));
    group_.comm = comm_->device_comm();
    group_.number = comm_->group_number();
    group_.fatal_errors = false;
    group_.control = control_.as<toy::Control>();
    group_.report = report_.as<toy::Report>();
    group_.areas = areas_.as<const HeapRange>();
    group_.map = map_;
  }

  // Enqueues a turn; with a status other than SUCCESS one that has failed on the host.
  void pass(std::uint64_t number, std::uint64_t factor, xd_status status = XD_SUCCESS) {
    pass(number, factor, status, nullptr, -1);
  }
  // The last two as in toy::Params.
  void pass(std::uint64_t number, std::uint64_t factor, xd_status status, std::uint64_t* gate,
            int speaks_for) {
    toy::Params params = next_params();
    params.record.call.status = static_cast<std::uint8_t>(status);
    params.record.factor = factor;
    params.number = number;
    params.gate = gate;
    params.speaks_for = speaks_for;
    launch(params, stream_);
  }
  // Enqueues a turn that moves nothing and ends ahead of the gate.
  void pass_ahead(std::uint64_t* gate) {
    toy::Params params = next_params();
    params.gate = gate;
    params.ends_ahead = true;
    launch(params, stream_);
  }
  // Enqueues it on another stream, which is a mistake while a turn runs. Waits for it.
  void overlap() {
    const cuda::Stream other(kDevice);
    launch(next_params(), other);
    other.synchronize();
  }
  // A copy of DeviceControl::owner, while kernels run.
  std::uint64_t owner() {
    const cuda::Stream other(kDevice);
    const cuda::DeviceGuard guard(kDevice);
    XD_CUDA_CHECK(cudaMemcpyAsync(copied_.data(), &group_.control->owner, sizeof(std::uint64_t),
                                  cudaMemcpyDefault, other.get()));
    other.synchronize();
    return *copied_.as<std::uint64_t>();
  }
  void wait() const { stream_.synchronize(); }

  // Both wait for the stream.
  void poison() {
    *copied_.as<std::uint64_t>() = kPoison;
    copy(mailbox(), copied_.data());
  }
  std::uint64_t received() {
    copy(copied_.data(), mailbox());
    return *copied_.as<std::uint64_t>();
  }

  toy::Report& report() { return *report_.as<toy::Report>(); }

 private:
  toy::Params next_params() {
    toy::Params params{};
    params.group = group_;
    params.launch = ++launches_;
    params.record.factor = 1;
    params.record.mailbox = turn::PeerAddress::shared(map_.mailbox);
    params.speaks_for = -1;
    return params;
  }
  static void launch(const toy::Params& params, const cuda::Stream& stream) {
    const cuda::DeviceGuard guard(kDevice);
    toy::launch(params, stream.get());
  }
  std::byte* mailbox() const { return segments_[at(comm_->rank())]->base() + map_.mailbox; }
  void copy(std::byte* to, const std::byte* from) const {
    const cuda::DeviceGuard guard(kDevice);
    XD_CUDA_CHECK(
        cudaMemcpyAsync(to, from, sizeof(std::uint64_t), cudaMemcpyDefault, stream_.get()));
    stream_.synchronize();
  }

  const std::shared_ptr<Comm> comm_;
  const toy::Map map_;
  const Segments segments_;
  cuda::DeviceBuffer control_, areas_;
  cuda::PinnedBlock report_, copied_;
  cuda::Stream stream_{kDevice};
  toy::Group group_{};
  std::uint32_t launches_ = 0;
};

class CudaToyTurns : public testing::Test {
 protected:
  void SetUp() override {
    const Feature cuda = feature(XD_FEATURE_CUDA);
    if (!cuda.available) GTEST_SKIP() << cuda.reason;
    comms_ = make_cuda_comms(kRanks);
    expect_no_errors(on_threads(kRanks, [&](int rank) {
      comms_[at(rank)]->begin_group();
      toys_[at(rank)] = std::make_unique<CudaToy>(comms_[at(rank)]);
      toys_[at(rank)]->poison();
    }));
  }

  void expect_passed(std::uint64_t number, std::uint64_t factor) {
    for (auto& toy : toys_) toy->pass(number++, factor);
    for (auto& toy : toys_) toy->wait();
    EXPECT_EQ(toys_[0]->received(), (number - 1) * factor);
    EXPECT_EQ(toys_[1]->received(), (number - 2) * factor);
  }

  std::vector<std::shared_ptr<Comm>> comms_;
  std::vector<std::unique_ptr<CudaToy>> toys_{kRanks};
};

TEST_F(CudaToyTurns, PassNumbersOnForMoreTurnsThanThereAreSlots) {
  for (std::uint64_t n = 0; n < 20; ++n) expect_passed(10 * n + 1, 2);
  for (const auto& comm : comms_) EXPECT_EQ(comm->errors().fatal_error(), nullptr);
}

// As relays raise the flags of ranks on other machines: such a rank may have left by then.
TEST_F(CudaToyTurns, EndWithoutAFlagThatAnotherRankHasRaisedAndHearWhatItSays) {
  const cuda::PinnedBlock gate(kDevice, sizeof(std::uint64_t));
  auto* const word = gate.as<std::uint64_t>();
  std::atomic_ref(*word).store(0);
  toys_[1]->pass(1, 2, XD_SUCCESS, word, -1);
  toys_[0]->pass(2, 2, XD_SUCCESS, nullptr, 1);
  toys_[0]->wait();  // rank 1 has not raised its flag
  const toy::Report& report = toys_[0]->report();
  EXPECT_EQ(report.status, XD_ERROR_MISMATCH);
  EXPECT_EQ(report.rank, 1);
  std::atomic_ref(*word).store(1);
  toys_[1]->wait();
  EXPECT_EQ(toys_[1]->report().written, 0u);
  EXPECT_EQ(toys_[1]->received(), 4u);
  for (const auto& comm : comms_) EXPECT_EQ(comm->errors().fatal_error(), nullptr);
}

TEST_F(CudaToyTurns, ThatEndAheadOfTheirLastWorkGoOnInOrder) {
  const cuda::PinnedBlock gate(kDevice, sizeof(std::uint64_t));
  std::atomic_ref(*gate.as<std::uint64_t>()).store(1);
  for (std::uint64_t n = 1; n < 10; ++n) {
    for (int i = 0; i < 3; ++i) {
      for (auto& toy : toys_) toy->pass_ahead(gate.as<std::uint64_t>());
    }
    for (auto& toy : toys_) toy->wait();
    for (auto& toy : toys_) EXPECT_EQ(toy->owner(), (4 * n - 1) << 32);
    expect_passed(n, 3);
  }
  for (const auto& comm : comms_) EXPECT_EQ(comm->errors().fatal_error(), nullptr);
}

TEST_F(CudaToyTurns, OwnTheSequenceUntilTheirLastWorkIsDone) {
  const cuda::PinnedBlock gate(kDevice, sizeof(std::uint64_t));
  auto* const word = gate.as<std::uint64_t>();
  std::atomic_ref(*word).store(0);
  for (auto& toy : toys_) toy->pass_ahead(word);
  const auto deadline = Deadline::after_ms(20000);
  std::uint64_t owner = 0;
  while ((owner = toys_[0]->owner()) >> 32 != 1) ASSERT_FALSE(deadline.passed());
  EXPECT_EQ(static_cast<std::uint32_t>(owner), 2u) << "both blocks wait at the gate";
  toys_[0]->overlap();
  ASSERT_NE(comms_[0]->errors().fatal_error(), nullptr);
  EXPECT_EQ(comms_[0]->errors().fatal_error()->status, XD_ERROR_BUSY);
  EXPECT_NE(static_cast<std::uint32_t>(toys_[0]->owner()), 0u) << "the first launch still writes";
  std::atomic_ref(*word).store(1);
  for (auto& toy : toys_) toy->wait();
}

TEST_F(CudaToyTurns, ThatDisagreeMoveNothingAndAreToldInTheFamilysWords) {
  toys_[0]->pass(1, 2);
  toys_[1]->pass(1, 3);
  for (auto& toy : toys_) toy->wait();
  for (int rank = 0; rank < kRanks; ++rank) {
    toy::Report& report = toys_[at(rank)]->report();
    EXPECT_EQ(report.status, XD_ERROR_MISMATCH);
    EXPECT_EQ(report.errors, 1u);
    const auto operation_error = turn::disagreement<toy::Family>({report.record, kRanks}, rank);
    EXPECT_EQ(operation_error.text, rank == 0 ? "ranks disagree; rank 1: factor 3, here 2"
                                              : "ranks disagree; rank 0: factor 2, here 3");
    EXPECT_EQ(toys_[at(rank)]->received(), kPoison);
    report.taken = report.written;
  }
  expect_passed(5, 7);
}

TEST_F(CudaToyTurns, ThatFailOnOneRankAreToldToThePeer) {
  toys_[0]->pass(1, 2, XD_ERROR_INVALID_ARGUMENT);
  toys_[1]->pass(1, 2);
  for (auto& toy : toys_) toy->wait();
  EXPECT_EQ(toys_[0]->report().written, 0u) << "the host knows of its own failure";
  toy::Report& report = toys_[1]->report();
  EXPECT_EQ(turn::disagreement<toy::Family>({report.record, kRanks}, 1).text,
            "ranks disagree; rank 0: its call failed with XD_ERROR_INVALID_ARGUMENT (its own error "
            "text says why)");
  for (auto& toy : toys_) EXPECT_EQ(toy->received(), kPoison);
  report.taken = report.written;
  expect_passed(5, 7);
}

}  // namespace
}  // namespace xd::test
