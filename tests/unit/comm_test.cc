// The doorbell and the error board, by threads of this process.
#include <gtest/gtest.h>

#include <atomic>
#include <thread>
#include <vector>

#include "comm/doorbell.h"
#include "comm/fatal.h"
#include "meet/rank_names.h"

namespace xd {
namespace {

TEST(DoorbellTest, NoRingIsMissed) {
  Doorbell bell;
  std::atomic<int> flag{0};
  constexpr int kRounds = 20000;
  std::thread ringer([&] {
    for (int i = 1; i <= kRounds; ++i) {
      while (flag.load(std::memory_order_acquire) != -i + 1) std::this_thread::yield();
      flag.store(i, std::memory_order_release);
      bell.ring();
    }
  });
  // A missed ring would sleep until the deadline.
  const Deadline deadline = Deadline::after_ms(60000);
  for (int i = 1; i <= kRounds; ++i) {
    for (;;) {
      const std::uint32_t rings = bell.value();
      if (flag.load(std::memory_order_acquire) == i) break;
      ASSERT_FALSE(deadline.passed()) << "round " << i;
      bell.sleep(rings, deadline);
    }
    flag.store(-i, std::memory_order_release);
  }
  ringer.join();
}

TEST(DoorbellTest, SleepEndsAtTheDeadline) {
  Doorbell bell;
  const auto start = Deadline::Clock::now();
  bell.sleep(bell.value(), Deadline::after_ms(50));
  EXPECT_GE(Deadline::Clock::now() - start, std::chrono::milliseconds(49));
}

TEST(DoorbellTest, ARingBeforeSleepingIsNotSleptThrough) {
  Doorbell bell;
  const std::uint32_t rings = bell.value();
  bell.ring();
  const auto start = Deadline::Clock::now();
  bell.sleep(rings, Deadline::after_ms(30000));
  EXPECT_LT(Deadline::Clock::now() - start, std::chrono::seconds(10));
}

class ErrorBoardTest : public testing::Test {
 protected:
  static constexpr int kRanks = 4;
  ErrorBoardTest() : memory_(RankBoardMap::make(kRanks).end / sizeof(Block) + 1) {}

  struct alignas(64) Block {
    std::byte bytes[64] = {};
  };
  std::vector<Block> memory_;
  RankBoard board_{NearMemory(memory_.data()->bytes), kRanks};
};

TEST_F(ErrorBoardTest, StartsEmpty) { EXPECT_EQ(board_.error(), nullptr); }

TEST_F(ErrorBoardTest, TheFirstErrorStays) {
  EXPECT_TRUE(board_.post(2, {.status = XD_ERROR_TIMEOUT, .rank = 2, .peer = 1}));
  EXPECT_FALSE(board_.post(0, {.status = XD_ERROR_ABORTED, .rank = 0, .peer = 0}));
  ASSERT_NE(board_.error(), nullptr);
  EXPECT_EQ(board_.error()->status, XD_ERROR_TIMEOUT);
  EXPECT_EQ(board_.error()->peer, 1);
}

TEST_F(ErrorBoardTest, ConcurrentWritersLeaveOneWholeError) {
  std::vector<std::thread> writers;
  for (int writer = 0; writer < kRanks; ++writer) {
    writers.emplace_back([this, writer] {
      board_.post(writer, {.status = XD_ERROR_TIMEOUT,
                           .rank = writer,
                           .peer = writer + 100,
                           .expected_epoch = static_cast<std::uint64_t>(writer) + 1000});
    });
  }
  const FatalError* error = nullptr;
  while ((error = board_.error()) == nullptr) std::this_thread::yield();
  EXPECT_EQ(error->peer, error->rank + 100);
  EXPECT_EQ(error->expected_epoch, static_cast<std::uint64_t>(error->rank) + 1000);
  for (std::thread& writer : writers) writer.join();
  EXPECT_EQ(board_.error(), error);
}

TEST(LastErrorTest, KeepsTheWhereaboutsBehindATextThatIsTooLong) {
  set_last_error("xd_go", std::string(5000, 'x').c_str(), " [rank 0 of 1]");
  const std::string text = last_error();
  EXPECT_TRUE(text.starts_with("xd_go: xxx")) << text;
  EXPECT_TRUE(text.ends_with("xxx [rank 0 of 1]")) << text;
}

TEST(FatalErrorTest, TextsSayWhoWaitedForWhomAndWhere) {
  const char* const names[] = {"walk", "run"};
  const Operations operations{"xd_go_", "an xd_go_operation", 1, names};
  const FatalError timeout{.status = XD_ERROR_TIMEOUT,
                           .phase = XD_PHASE_COUNTS,
                           .rank = 1,
                           .peer = 3,
                           .group = 2,
                           .operation = 2,
                           .timeout_ms = 250,
                           .expected_epoch = 7,
                           .seen_epoch = 6};
  EXPECT_EQ(describe(timeout, &operations, {}),
            "rank 1 waited 250 ms in xd_go_run of group 2, epoch 7 for rank 3 to send its "
            "counts: expected epoch 7, seen 6");
  // Host calls have no epochs.
  const FatalError host{
      .status = XD_ERROR_TIMEOUT, .phase = XD_PHASE_HOST, .rank = 1, .peer = 0, .timeout_ms = 250};
  EXPECT_EQ(describe(host, nullptr, {}),
            "rank 1 waited 250 ms in a collective host call for rank 0 to take part");
  FatalError lost{.status = XD_ERROR_PEER_LOST, .rank = 0, .peer = 2};
  EXPECT_EQ(describe(lost, nullptr, {}),
            "rank 2 was lost: the process has ended or broken the protocol");
  lost.num_lost = 2;
  lost.lost = {2, 3};
  EXPECT_EQ(describe(lost, nullptr, {}),
            "ranks 2, 3 were lost: the process has ended or broken the protocol");
  const RankNames on_hosts(std::vector{0, 0, 1, 1}, {"west", "east"});
  EXPECT_EQ(describe(timeout, &operations, on_hosts),
            "rank 1 of host 0 (west) waited 250 ms in xd_go_run of group 2, epoch 7 for rank 3 of "
            "host 1 (east) to send its counts: expected epoch 7, seen 6");
  RankNames known(std::vector{0, 0, 1, 1}, {"west", "east"});
  known.set_numbers({0, 2, 4, 6});
  known.set_processes({40, 41, 42, 42});
  EXPECT_EQ(describe(timeout, &operations, known),
            "rank 1 (global rank 2) of host 0 (west) waited 250 ms in xd_go_run of group 2, epoch "
            "7 for rank 3 (global rank 6, pid 42) of host 1 (east) to send its counts: expected "
            "epoch 7, seen 6");
  EXPECT_EQ(describe(lost, nullptr, known),
            "ranks 2, 3 (global ranks 4, 6) of host 1 (east) were lost: the process has ended or "
            "broken the protocol (pid 42)");
  lost.timeout_ms = 3000;
  EXPECT_EQ(describe(lost, nullptr, on_hosts),
            "ranks 2, 3 of host 1 (east) were lost: the host has not answered for 3000 ms");
  FatalError chunk = timeout;
  chunk.status = XD_ERROR_INTERNAL;
  chunk.phase = XD_PHASE_ENTRY;
  EXPECT_EQ(describe(chunk, &operations, on_hosts),
            "fatal error XD_ERROR_INTERNAL raised by rank 1 of host 0 (west) in xd_go_run of group "
            "2, epoch 7: rank 3 of host 1 (east) has sent a chunk that cannot be");
  chunk.operation = -1;  // met where no operation is known
  EXPECT_EQ(describe(chunk, nullptr, {}),
            "fatal error XD_ERROR_INTERNAL raised by rank 1 in group 2: rank 3 has sent a chunk "
            "that cannot be");
  chunk.peer = chunk.rank;
  EXPECT_EQ(describe(chunk, nullptr, {}),
            "fatal error XD_ERROR_INTERNAL raised by rank 1 in group 2");
  EXPECT_EQ(status_of({}), XD_ERROR_INTERNAL);
  EXPECT_EQ(status_of(timeout), XD_ERROR_TIMEOUT);
}

}  // namespace
}  // namespace xd
