// Communicators of threads, by their own header: what the C API cannot bring about.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"
#include "memory/host_segment.h"
#include "unit/mesh_support.h"
#include "unit/net_support.h"

namespace xd::test {
namespace {

std::vector<std::shared_ptr<xd::Comm>> thread_comms(int num_ranks) {
  std::vector<std::shared_ptr<xd::Comm>> comms(at(num_ranks));
  const xd_unique_id id = new_id();
  expect_no_errors(on_threads(num_ranks, [&](int rank) {
    xd_comm_config config = id_config(id, rank, num_ranks);
    config.timeout_ms = 20000;
    comms[at(rank)] = xd::Comm::create(config);
  }));
  return comms;
}

xd::Cause cause(const char* text) {
  xd::Cause result;
  std::strncpy(result.text.data(), text, result.text.size() - 1);
  return result;
}

// A device that may refuse to be told where symmetric memory lies, and whose kernels may meet an
// error.
class FakeDevice final : public DeviceSide {
 public:
  explicit FakeDevice(bool refuses) : refuses_(refuses) {}
  const DeviceComm& device_comm() const override { return device_comm_; }
  std::unique_ptr<SegmentMaker> lender(void*) const override { return nullptr; }
  void set_finished() override {}
  void set_left(int) override {}
  void set_heap(std::uint32_t, std::span<const std::shared_ptr<Segment>>) override {
    if (refuses_) fail(XD_ERROR_SYSTEM, "the device refuses");
  }
  const FatalError* raised() const override { return raised_; }
  void raise(const FatalError& error) {
    error_ = error;
    raised_ = &error_;
  }

 private:
  bool refuses_;
  DeviceComm device_comm_{};
  FatalError error_;
  std::atomic<const FatalError*> raised_{nullptr};
};

// The errors of rank 1 of 2 ranks, with a device and without a peer.
class ErrorsOfRank1 {
 public:
  FakeDevice device{false};

  ErrorsOfRank1() {
    member_.join(new_id(), 0, 1);
    const HostSegmentMaker host;
    for (int r = 0; r < 2; ++r) {
      segments_.push_back(host.create(RankBoardMap::make(2).end, "a board").segment);
    }
    errors_ = std::make_unique<Errors>(hosts_, *member_.mesh, segments_, &device);
  }
  Errors& operator*() { return *errors_; }
  Errors* operator->() { return errors_.get(); }
  // What rank 0 does when it leaves with an error.
  void report_of_rank_0(const FatalError& error) {
    RankBoard(NearMemory(segments_[1]->base()), 2).post(0, error);
  }

 private:
  Member member_;
  const HostMap hosts_{1, 2};
  Segments segments_;
  std::unique_ptr<Errors> errors_;
};

void expect_fatal(const Errors& errors, xd_status status, int rank, const std::string& text) {
  const FatalError* error = errors.fatal_error();
  ASSERT_NE(error, nullptr);
  EXPECT_EQ(error->status, status);
  EXPECT_EQ(error->rank, rank);
  EXPECT_NE(errors.text_of(*error).find(text), std::string::npos) << errors.text_of(*error);
  expect_error(error_of([&] { errors.check_usable(); }), status, text);
}

// An error of an operation in a group whose errors are fatal, as rank `rank` meets it.
FatalError met_by(int rank, xd_status status) {
  return {.status = status,
          .rank = rank,
          .peer = 1,
          .group = 7,
          .operation = 1,
          .expected_epoch = 4,
          .met_by_all = 1};
}

// Every rank meets such an error by itself; the first to leave also writes it to the others'
// boards, so that its goodbye is not taken for the cause.
TEST(Communicator, ShowsStatusAndTextOfOneRankAndItsOwnOnceItHasMetAnError) {
  auto comms = thread_comms(2);
  comms[0]->errors().raise_cause(met_by(0, XD_ERROR_MISMATCH), cause("as rank 0 has it"));
  expect_fatal(comms[0]->errors(), XD_ERROR_MISMATCH, 0, "as rank 0 has it");
  comms[0]->close();
  Errors& errors = comms[1]->errors();
  ASSERT_TRUE(eventually([&] { return errors.fatal_error() != nullptr; }));
  expect_fatal(errors, XD_ERROR_MISMATCH, 0, "fatal error XD_ERROR_MISMATCH raised by rank 0");
  errors.raise_cause(met_by(1, XD_ERROR_INVALID_ARGUMENT), cause("as rank 1 has it"));
  expect_fatal(errors, XD_ERROR_INVALID_ARGUMENT, 1, "as rank 1 has it");
  errors.raise_cause(met_by(1, XD_ERROR_OVERFLOW), cause("a second one"));
  expect_fatal(errors, XD_ERROR_INVALID_ARGUMENT, 1, "as rank 1 has it");
}

TEST(Communicator, ShowsAnErrorThatCameBeforeItsOwn) {
  ErrorsOfRank1 errors;
  errors.report_of_rank_0({.status = XD_ERROR_BUSY, .rank = 0, .peer = 0, .group = 3});
  errors->raise_cause(met_by(1, XD_ERROR_INVALID_ARGUMENT), cause("as rank 1 has it"));
  expect_fatal(*errors, XD_ERROR_BUSY, 0, "rank 0 used group 3 at once");
}

TEST(Communicator, ShowsTheErrorOfItsKernelsAfterTheReportOfAPeer) {
  for (const bool watched : {false, true}) {
    ErrorsOfRank1 errors;
    for (const int group : {6, 7}) {
      errors->explain_by(group, [group](const FatalError& error) {
        return cause(group == 7 && error.rank == 1 ? "of my kernel" : "another");
      });
    }
    errors.report_of_rank_0(met_by(0, XD_ERROR_MISMATCH));
    if (watched) errors->on_tick();
    expect_fatal(*errors, XD_ERROR_MISMATCH, 0, "raised by rank 0");
    errors.device.raise({.status = XD_ERROR_ABORTED, .rank = 1, .peer = 1});
    expect_fatal(*errors, XD_ERROR_MISMATCH, 0, "raised by rank 0");
    errors.device.raise(met_by(1, XD_ERROR_OVERFLOW));
    expect_fatal(*errors, XD_ERROR_OVERFLOW, 1, "of my kernel");
    errors->explain_by(7, {});  // the group goes
    expect_fatal(*errors, XD_ERROR_OVERFLOW, 1, "of my kernel");
  }
}

// The peers have ended that operation, so this rank's part of it ends as well.
TEST(Communicator, EndsAnOperationWhoseErrorAPeerHasReported) {
  auto comms = thread_comms(2);
  comms[0]->errors().raise_cause(met_by(0, XD_ERROR_MISMATCH), cause("as rank 0 has it"));
  comms[0]->close();
  ASSERT_TRUE(eventually([&] { return comms[1]->errors().fatal_error() != nullptr; }));
  const auto wait = [&](int group, std::uint64_t epoch) {
    int looks = 0;
    const HostWait site{XD_PHASE_DONE, group, 1, epoch, Deadline::after_ms(20000)};
    return error_of([&] {
      comms[1]->wait_for(
          0, site, [&] { return ++looks > 2; }, [] { return std::uint64_t{0}; });
    });
  };
  EXPECT_EQ(wait(7, 4), std::nullopt);
  expect_error(wait(7, 5), XD_ERROR_MISMATCH, "raised by rank 0");
  expect_error(wait(6, 4), XD_ERROR_MISMATCH, "raised by rank 0");
  comms[1]->errors().abort();
  expect_error(wait(7, 4), XD_ERROR_MISMATCH, "raised by rank 0");
}

TEST(Communicator, OfAForkTakesNoLockThatItsParentMayHold) {
  ErrorsOfRank1 errors;
  std::atomic<bool> held{false}, over{false};
  errors->explain_by(7, [&](const FatalError&) {
    held = true;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return cause("late");
  });
  errors.device.raise(met_by(1, XD_ERROR_OVERFLOW));
  std::thread holder([&] { errors->fatal_error(); });
  EXPECT_TRUE(eventually([&] { return held.load(); }));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(5);
    errors->explain_by(7, {});
    ::_exit(0);
  }
  int ended = -1;
  EXPECT_EQ(::waitpid(child, &ended, 0), child);
  EXPECT_EQ(ended, 0) << "signal " << WTERMSIG(ended);
  over = true;
  holder.join();
}

TEST(Communicator, RanksThatNumberTheirSegmentsDifferentlyAreToldSo) {
  const auto comms = thread_comms(2);
  comms[1]->heap().make_room();
  comms[1]->heap().add_registered({nullptr, nullptr});
  const auto errors = on_threads(2, [&](int rank) { comms[at(rank)]->memory().grow(4096); });
  expect_error(errors[0], XD_ERROR_MISMATCH, "rank 1 has other segments");
  expect_error(errors[1], XD_ERROR_MISMATCH, "rank 0 has other segments");
  for (const auto& comm : comms) EXPECT_EQ(comm->heap().usage().segments, 0);
  expect_no_errors(on_threads(2, [&](int rank) { comms[at(rank)]->collective().barrier(); }));
}

// Its kernels may still find memory that the caller is about to free.
TEST(Communicator, IsFinishedByADeviceThatCannotBeToldOfADeregistration) {
  const auto comms = thread_comms(2);
  const HostSegmentMaker host;
  const auto errors = on_threads(2, [&](int rank) {
    xd::Comm& comm = *comms[at(rank)];
    FakeDevice device(rank == 0);
    SymmetricMemory memory(rank, comm.collective(), comm.errors(), host, &device);
    memory.heap().make_room();
    memory.heap().add_registered({nullptr, nullptr});
    const auto error = error_of([&] { memory.delist(0); });
    EXPECT_FALSE(memory.heap().is_registered(0)) << "rank " << rank;
    if (error) throw Error(*error);
  });
  expect_error(errors[0], XD_ERROR_SYSTEM, "the device refuses");
  expect_error(errors[1], XD_ERROR_MISMATCH, "rank 0 failed: the device refuses");
  for (const auto& comm : comms) {
    ASSERT_TRUE(eventually([&] { return comm->errors().fatal_error() != nullptr; }));
    EXPECT_EQ(comm->errors().fatal_error()->status, XD_ERROR_SYSTEM);
    EXPECT_EQ(comm->errors().fatal_error()->rank, 0);
  }
}

}  // namespace
}  // namespace xd::test
