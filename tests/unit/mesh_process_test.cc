// The mesh between processes, some of which are killed. The other process is this program, started
// anew to run OtherProcess.DISABLED_Main, which takes its orders from the environment.
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>

#include "unit/mesh_support.h"

namespace xd::test {
namespace {

constexpr const char* kOrders = "XD_TEST_ORDERS";
constexpr const char* kId = "XD_TEST_ID";

std::string hex(const xd_unique_id& id) {
  std::string text;
  for (const unsigned char byte : id.bytes) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

xd_unique_id id_from_hex(const std::string& text) {
  xd_unique_id id;
  for (std::size_t i = 0; i < sizeof(id.bytes); ++i)
    id.bytes[i] = static_cast<unsigned char>(std::stoi(text.substr(2 * i, 2), nullptr, 16));
  return id;
}

// A process with ranks 1 and 2 of 4; ranks 0 and 3 are threads of the test.
class OtherRanks {
 public:
  explicit OtherRanks(const std::string& orders) {
    const xd_unique_id id = new_id();
    ::setenv(kOrders, orders.c_str(), 1);
    ::setenv(kId, hex(id).c_str(), 1);
    const char* arguments[]{"/proc/self/exe", "--gtest_filter=OtherProcess.DISABLED_Main",
                            "--gtest_also_run_disabled_tests", "--gtest_brief=1", nullptr};
    const int error = ::posix_spawn(&pid_, arguments[0], nullptr, nullptr,
                                    const_cast<char**>(arguments), environ);
    if (error != 0) fail_errno("posix_spawn", error);
    expect_no_errors(on_threads(2, [&](int thread) {
      const int rank = thread == 0 ? 0 : 3;
      Member& member = thread == 0 ? zero : three;
      member.join(id, rank, 4);
      EXPECT_EQ(member.mesh->local_ranks(), 2);
      member.gather("all here");
    }));
  }
  ~OtherRanks() { kill(); }
  OtherRanks(const OtherRanks&) = delete;
  OtherRanks& operator=(const OtherRanks&) = delete;

  void kill() {
    if (pid_ > 0) {
      ::kill(pid_, SIGKILL);
      wait();
    }
  }
  int wait() {
    int status = -1;
    ::waitpid(pid_, &status, 0);
    pid_ = -1;
    return status;
  }

  Member zero, three;

 private:
  pid_t pid_ = -1;
};

// The other process's part once all ranks are there.
TEST(OtherProcess, DISABLED_Main) {
  const char* text = std::getenv(kOrders);
  if (text == nullptr) GTEST_SKIP() << "runs in processes that other tests start";
  const std::string orders = text;
  const xd_unique_id id = id_from_hex(std::getenv(kId));
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
