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

// Every rank meets the error by itself; the first to leave also writes it to the others' boards, so
// that its goodbye is not taken for the cause.
TEST(Communicator, TellsItsOwnCauseOfAnErrorThatAPeerHasReportedFirst) {
  for (const bool ends : {false, true}) {
    auto comms = thread_comms(2);
    for (const int group : {6, 7}) {
      comms[1]->errors().explain_by(group, [group](const FatalError&) {
        return cause(group == 7 ? "the cause" : "another");
      });
    }
    comms[0]->errors().raise_cause(
        {.status = XD_ERROR_OVERFLOW, .rank = 0, .group = 7, .operation = 1, .met_by_all = 1},
        cause("as rank 0 has it"));
    comms[0]->close();
    ASSERT_TRUE(eventually([&] { return comms[1]->errors().fatal_error() != nullptr; }));
    if (ends) comms[1]->errors().explain_by(7, {});  // the group goes
    EXPECT_EQ(comms[1]->errors().text_of(*comms[1]->errors().fatal_error()), "the cause");
    expect_error(error_of([&] { comms[1]->errors().check_usable(); }), XD_ERROR_OVERFLOW,
                 "the cause");
  }
}

TEST(Communicator, OfAForkTakesNoLockThatItsParentMayHold) {
  const auto comms = thread_comms(1);
  std::atomic<bool> held{false}, over{false};
  comms[0]->errors().explain_by(0, [&](const FatalError&) {
    held = true;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return cause("late");
  });
  std::thread holder([&] { comms[0]->errors().text_of({.group = 0, .met_by_all = 1}); });
  EXPECT_TRUE(eventually([&] { return held.load(); }));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(5);
    comms[0]->errors().explain_by(0, {});
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

// A device that may refuse to be told where symmetric memory lies.
class FakeDevice final : public DeviceSide {
 public:
  explicit FakeDevice(bool refuses) : refuses_(refuses) {}
  const DeviceComm& device_comm() const override { return device_comm_; }
  void set_finished() override {}
  void set_left(int) override {}
  void set_heap(std::uint32_t, std::span<const std::shared_ptr<Segment>>) override {
    if (refuses_) fail(XD_ERROR_SYSTEM, "the device refuses");
  }
  const FatalError* raised() const override { return nullptr; }

 private:
  bool refuses_;
  DeviceComm device_comm_{};
};

// Its kernels may still find memory that the caller is about to free.
TEST(Communicator, IsFinishedByADeviceThatCannotBeToldOfADeregistration) {
  const auto comms = thread_comms(2);
  const HostSegmentMaker host;
  const auto errors = on_threads(2, [&](int rank) {
    xd::Comm& comm = *comms[at(rank)];
    FakeDevice device(rank == 0);
    SymmetricMemory memory(rank, {kDLCPU, 0}, comm.collective(), comm.errors(), host, &device);
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
