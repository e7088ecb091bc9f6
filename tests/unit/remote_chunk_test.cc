// How large the frames are in which rows go to other machines.
#include "ep/bulk/chunk.h"

#include <gtest/gtest.h>

#include "net/engine.h"
#include "net/link_map.h"

namespace xd::ep {
namespace {

constexpr std::size_t kKiB = 1 << 10, kMiB = 1 << 20;

// Their bytes with what links put in front of chunks.
RemoteWindow window(int num_machines, std::int64_t net_buffer_bytes = 0, int hidden = 7168,
                    int tokens = 4096, int most_frames = kMostDirectionFrames) {
  xd_ep_config user XD_EP_CONFIG_INIT;
  user.num_ranks = 64;
  user.num_experts = 256;
  user.max_topk = 8;
  user.max_tokens_per_rank = tokens;
  user.hidden = hidden;
  user.net_buffer_bytes = net_buffer_bytes;
  RemoteWindow found = remote_window(read_config(&user, 0), num_machines - 1, most_frames);
  found.frame_bytes += sizeof(net::LinkHeader);
  return found;
}

void expect_window(const RemoteWindow& found, int frames, std::size_t frame_bytes) {
  EXPECT_EQ(found.frames, frames);
  EXPECT_EQ(found.frame_bytes, frame_bytes);
}

// 4 MiB for each direction at each end, but for four frames at least for each other machine.
TEST(RemoteWindows, HaveAUsualSize) {
  expect_window(window(2), 16, 256 * kKiB);
  expect_window(window(3), 8, 256 * kKiB);
  expect_window(window(8), 4, 256 * kKiB);
  expect_window(window(32), 4, 256 * kKiB);
  expect_window(window(64), 4, 128 * kKiB);
  expect_window(window(256), 4, 64 * kKiB);
}

TEST(RemoteWindows, ShareTheBytesThatTheConfigGives) {
  expect_window(window(2, std::int64_t{16} * kMiB), 16, 256 * kKiB);
  expect_window(window(5, std::int64_t{4} * 4 * 4 * 100 * kKiB), 4, 100 * kKiB);
}

TEST(RemoteWindows, HaveBounds) {
  expect_window(window(2, 1), 4, 64 * kKiB);
  expect_window(window(64, std::int64_t{8} * kMiB), 4, 64 * kKiB);
  expect_window(window(2, std::int64_t{1} << 62), 16, 512 * kKiB);
}

// An entry and counts need two.
TEST(RemoteWindows, AreNoLongerThanTheLargestBatch) {
  expect_window(window(2, 0, 7168, 1), 2, 256 * kKiB);
  expect_window(window(2, 0, 7168, 8), 2, 256 * kKiB);
  EXPECT_EQ(window(2, 0, 7168, 64).frames, 4);
}

// As over TCP, and on CUDA devices: 2 MiB for each other machine.
TEST(RemoteWindows, AreOfTwoFramesWhereMoreAreOfNoUse) {
  const auto short_window = [](int machines, std::int64_t bytes) {
    return window(machines, bytes, 7168, 4096, kFewestDirectionFrames);
  };
  expect_window(short_window(2, 0), 2, 256 * kKiB);
  expect_window(short_window(32, 0), 2, 256 * kKiB);
  expect_window(short_window(2, std::int64_t{8} * 100 * kKiB), 2, 100 * kKiB);
  expect_window(short_window(5, std::int64_t{4} * 8 * 100 * kKiB), 2, 100 * kKiB);
  expect_window(short_window(2, std::int64_t{1} << 62), 2, 512 * kKiB);
}

// Else an engine loses credits.
TEST(RemoteWindows, HaveNoMoreEventsThanAnEngineReports) {
  for (const int machines : {2, 33, 64, 65, 66, 129, 257, 400, 512}) {
    const RemoteWindow found = window(machines, std::int64_t{1} << 62);
    EXPECT_GE(found.frames, 2);
    EXPECT_LE(found.frames * 8 * (machines - 1), net::kEngineEvents) << machines;
  }
  EXPECT_EQ(window(65, std::int64_t{1} << 62).frames, 16);
  EXPECT_EQ(window(66, std::int64_t{1} << 62).frames, 15);
}

TEST(RemoteWindows, HaveRoomForTheLongestRow) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 40}) {
    EXPECT_GT(window(2, bytes, kMiB).frame_bytes, 2 * kMiB);
    EXPECT_LT(window(2, bytes, kMiB).frame_bytes, 2 * kMiB + 64 * kKiB);
  }
}

}  // namespace
}  // namespace xd::ep
