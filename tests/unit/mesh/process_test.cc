// The mesh between processes, some of which are killed. The other process is this program, started
// anew to run OtherProcess.DISABLED_Main, which takes its orders from the environment.
#include <signal.h>
#include <unistd.h>

#include <cstdlib>

#include "faults/hex.h"
#include "support/child_process.h"
#include "unit/mesh/support.h"

namespace xd::test {
namespace {

constexpr const char* kOrders = "XD_TEST_ORDERS";
constexpr const char* kId = "XD_TEST_ID";

// A process with ranks 1 and 2 of 4; ranks 0 and 3 are threads of the test.
class OtherRanks {
 public:
  explicit OtherRanks(const std::string& orders) : OtherRanks(orders, new_id()) {}

  void kill() { process_.kill(); }

  Member zero, three;

 private:
  OtherRanks(const std::string& orders, const xd_unique_id& id)
      : process_({{"--gtest_filter=OtherProcess.DISABLED_Main", "--gtest_also_run_disabled_tests",
                   "--gtest_brief=1"},
                  {{kOrders, orders}, {kId, to_hex(id)}},
                  ""}) {
    expect_no_errors(on_threads(2, [&](int thread) {
      const int rank = thread == 0 ? 0 : 3;
      Member& member = thread == 0 ? zero : three;
      member.join(id, rank, 4);
      EXPECT_EQ(member.mesh->local_ranks(), 2);
      member.gather("all here");
    }));
  }

  ChildProcess process_;
};

// The other process's part once all ranks are there.
TEST(OtherProcess, DISABLED_Main) {
  const char* text = std::getenv(kOrders);
  if (text == nullptr) GTEST_SKIP() << "runs in processes that other tests start";
  const std::string orders = text;
  const xd_unique_id id = from_hex<xd_unique_id>(std::getenv(kId));
  Member one, two;
  expect_no_errors(on_threads(2, [&](int thread) {
    Member& member = thread == 0 ? one : two;
    member.join(id, thread + 1, 4);
    EXPECT_EQ(member.mesh->local_ranks(), 2);
    member.gather("all here");
  }));
  if (orders == "rank 2 leaves") two.mesh.reset();
  if (orders == "grandchild") {
    const pid_t grandchild = ::fork();
    if (grandchild == 0) {
      // Holds the connections open for longer than the test waits, and ends by itself. CTest waits
      // for all that have its pipes.
      ::close(STDOUT_FILENO);
      ::close(STDERR_FILENO);
      ::sleep(3);
      ::_exit(0);
    }
    expect_no_errors(
        on_threads(2, [&](int thread) { (thread == 0 ? one : two).gather("the child is there"); }));
  }
  if (orders == "send and die") {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    expect_no_errors(
        on_threads(2, [&](int thread) { (thread == 0 ? one : two).gather("last words"); }));
    ::kill(::getpid(), SIGKILL);
  }
  std::this_thread::sleep_for(std::chrono::seconds(30));
}

TEST(MeshProcess, AKillIsNoticedThoughAForkedChildHoldsTheConnections) {
  OtherRanks ranks("grandchild");
  expect_no_errors(on_threads(2, [&](int thread) {
    (thread == 0 ? ranks.zero : ranks.three).gather("the child is there");
  }));
  const auto start = std::chrono::steady_clock::now();
  ranks.kill();
  for (Member* member : {&ranks.zero, &ranks.three}) {
    EXPECT_TRUE(eventually([&] { return member->diary.has("lost 1 2"); }, 1000));
    EXPECT_EQ(member->diary.entries().size(), 1U);
    expect_error(error_of([&] { member->gather(""); }), XD_ERROR_PEER_LOST, "ranks 1, 2");
  }
  EXPECT_LT(ms_since(start), 1000);
}

TEST(MeshProcess, WhatAProcessSentBeforeItDiedCounts) {
  OtherRanks ranks("send and die");
  expect_no_errors(on_threads(2, [&](int thread) {
    const auto items = (thread == 0 ? ranks.zero : ranks.three).gather("first words");
    EXPECT_EQ(text_of(items[1].blob), "last words");
    EXPECT_EQ(text_of(items[2].blob), "last words");
  }));
  EXPECT_TRUE(eventually([&] { return ranks.zero.diary.has("lost 1 2"); }, 1000));
  EXPECT_TRUE(eventually([&] { return ranks.three.diary.has("lost 1 2"); }, 1000));
}

TEST(MeshProcess, ARankThatLeftEarlierIsNotLostWithItsProcess) {
  OtherRanks ranks("rank 2 leaves");
  EXPECT_TRUE(eventually(
      [&] { return ranks.zero.diary.has("left 2") && ranks.three.diary.has("left 2"); }));
  ranks.kill();
  for (Member* member : {&ranks.zero, &ranks.three}) {
    EXPECT_TRUE(eventually([&] { return member->diary.has("lost 1"); }, 1000));
    EXPECT_EQ(member->diary.entries(), (std::vector<std::string>{"left 2", "lost 1"}));
  }
}

}  // namespace
}  // namespace xd::test
