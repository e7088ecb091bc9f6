// How large the frames are in which rows go to other machines.
#include "ep/bulk/chunk.h"

#include <gtest/gtest.h>

#include "net/link_map.h"

namespace xd::ep {
namespace {

constexpr std::size_t kKiB = 1 << 10, kMiB = 1 << 20;

// Of a frame with what links put in front of its chunk.
std::size_t frame_bytes(int num_machines, std::int64_t net_buffer_bytes, int hidden = 7168) {
  xd_ep_config user XD_EP_CONFIG_INIT;
  user.num_ranks = 64;
  user.num_experts = 256;
  user.max_topk = 8;
  user.max_tokens_per_rank = 128;
  user.hidden = hidden;
  user.net_buffer_bytes = net_buffer_bytes;
  return sizeof(net::LinkHeader) + remote_frame_bytes(read_config(&user, 0), num_machines);
}

TEST(RemoteSlots, HaveAUsualSize) {
  EXPECT_EQ(frame_bytes(2, 0), 256 * kKiB);
  EXPECT_EQ(frame_bytes(64, 0), 256 * kKiB);
}

// Four frames in each direction for each other machine.
TEST(RemoteSlots, ShareTheBytesThatTheConfigGives) {
  EXPECT_EQ(frame_bytes(2, std::int64_t{8} * 100 * kKiB), 100 * kKiB);
  EXPECT_EQ(frame_bytes(5, std::int64_t{4} * 8 * 100 * kKiB), 100 * kKiB);
}

TEST(RemoteSlots, HaveBounds) {
  EXPECT_EQ(frame_bytes(2, 1), 64 * kKiB);
  EXPECT_EQ(frame_bytes(64, std::int64_t{8} * kMiB), 64 * kKiB);
  EXPECT_EQ(frame_bytes(2, std::int64_t{1} << 62), 512 * kKiB);
}

TEST(RemoteSlots, HaveRoomForTheLongestRow) {
  for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{1} << 40}) {
    EXPECT_GT(frame_bytes(2, bytes, kMiB), 2 * kMiB);
    EXPECT_LT(frame_bytes(2, bytes, kMiB), 2 * kMiB + 64 * kKiB);
  }
}

}  // namespace
}  // namespace xd::ep
