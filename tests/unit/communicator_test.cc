// Communicators of threads, by their own header: what the C API cannot bring about.
#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "comm/comm.h"
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

xd::Comm::Cause cause(const char* text) {
  xd::Comm::Cause result;
  std::strncpy(result.text.data(), text, result.text.size() - 1);
  return result;
}

// Every rank meets the error by itself; the first to leave also writes it to the others' boards, so
// that its goodbye is not taken for the cause.
TEST(Communicator, TellsItsOwnCauseOfAnErrorThatAPeerHasReportedFirst) {
  for (const bool ends : {false, true}) {
    auto comms = thread_comms(2);
    for (const int group : {6, 7}) {
      comms[1]->explain_by(group, [group](const FatalError&) {
        return cause(group == 7 ? "the cause" : "another");
      });
    }
    comms[0]->raise_cause(
        {.status = XD_ERROR_OVERFLOW, .rank = 0, .group = 7, .operation = 1, .met_by_all = 1},
        cause("as rank 0 has it"));
    comms[0]->close();
    ASSERT_TRUE(eventually([&] { return comms[1]->fatal_error() != nullptr; }));
    if (ends) comms[1]->explain_by(7, {});  // the group goes
    EXPECT_EQ(comms[1]->text_of(*comms[1]->fatal_error()), "the cause");
    expect_error(error_of([&] { comms[1]->check_usable(); }), XD_ERROR_OVERFLOW, "the cause");
  }
}

TEST(Communicator, OfAForkTakesNoLockThatItsParentMayHold) {
  const auto comms = thread_comms(1);
  std::atomic<bool> held{false}, over{false};
  comms[0]->explain_by(0, [&](const FatalError&) {
    held = true;
    while (!over) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    return cause("late");
  });
  std::thread holder([&] { comms[0]->text_of({.group = 0, .met_by_all = 1}); });
  EXPECT_TRUE(eventually([&] { return held.load(); }));
  const pid_t child = ::fork();
  if (child == 0) {
    ::alarm(5);
    comms[0]->explain_by(0, {});
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
  const auto errors = on_threads(2, [&](int rank) { comms[at(rank)]->grow_heap(4096); });
  expect_error(errors[0], XD_ERROR_MISMATCH, "rank 1 has other segments");
  expect_error(errors[1], XD_ERROR_MISMATCH, "rank 0 has other segments");
  for (const auto& comm : comms) EXPECT_EQ(comm->heap().usage().segments, 0);
  expect_no_errors(on_threads(2, [&](int rank) { comms[at(rank)]->barrier(); }));
}

}  // namespace
}  // namespace xd::test
