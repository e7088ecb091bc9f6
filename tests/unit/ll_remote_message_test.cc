// Messages between machines in low latency: how long they may be, and which are refused.
#include "ep/slots/message.h"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "unit/net_support.h"

namespace xd::ep {
namespace {

using test::error_of;
using test::expect_error;

LlConfig config_of(int tokens, int topk, int hidden) {
  xd_ll_config user XD_LL_CONFIG_INIT;
  user.num_ranks = 4;
  user.num_experts = 8;
  user.max_topk = topk;
  user.max_tokens_per_rank = tokens;
  user.hidden = hidden;
  return read_ll_config(&user, 0);
}

std::vector<std::byte> message_of(const LlRemoteHeader& header, std::size_t body) {
  std::vector<std::byte> bytes(sizeof(header) + body);
  std::memcpy(bytes.data(), &header, sizeof(header));
  return bytes;
}

TEST(LlRemoteMessage, TheLongestHasRoomForAllTokensWithAllTheirChoicesOrWeights) {
  constexpr std::size_t kTokens = 128, kRow = std::size_t{2} * 7168;
  EXPECT_EQ(longest_ll_message(config_of(kTokens, 8, 7168)),
            sizeof(LlRemoteHeader) + kTokens * (LlRemoteRows{8, kRow}.item_bytes()));
  // Where rows are short, weights may be longer than they are; they lie in items as well.
  EXPECT_GE(longest_ll_message(config_of(1, 16, 8)), sizeof(LlRemoteHeader) + 16 * sizeof(float));
}

TEST(LlRemoteMessage, RowsAndSumsBeginAtMultiplesOf16Bytes) {
  for (int topk = 1; topk <= kMaxTopk; ++topk) {
    for (const std::size_t bytes : {16, 129, 4096}) {
      EXPECT_EQ((LlRemoteRows{topk, bytes}.row_at() % 16), 0u);
      EXPECT_EQ((LlRemoteRows{topk, bytes}.item_bytes() % 16), 0u);
      EXPECT_GE((LlRemoteRows{topk, bytes}.item_bytes()), ll_item_bytes(topk) + bytes);
      EXPECT_EQ(LlRemoteSums{bytes}.item_bytes() % 16, 0u);
    }
  }
}

TEST(LlRemoteMessage, IsReadAsItWasSent) {
  LlRemoteHeader header{};
  header.epoch = 7;
  header.kind = LlRemoteKind::sums;
  header.source = 3;
  header.items = 2;
  header.record.tokens = 5;
  const auto bytes = message_of(header, 64);
  const LlRemoteMessage message = LlRemoteMessage::read(bytes, 3);
  EXPECT_EQ(message.header.epoch, 7u);
  EXPECT_EQ(message.header.record.tokens, 5u);
  EXPECT_EQ(message.body.size(), 64u);
  EXPECT_EQ(message.item(1, 32), bytes.data() + sizeof(header) + 32);
  message.require_items(2, 32);
}

TEST(LlRemoteMessage, ThatCannotBeIsRefusedWithItsSender) {
  LlRemoteHeader header{};
  header.kind = LlRemoteKind::dispatch;
  header.source = 3;
  header.items = 2;
  const auto read = [](const LlRemoteHeader& h, std::size_t body, int from) {
    return error_of([&] { LlRemoteMessage::read(message_of(h, body), from); });
  };
  EXPECT_FALSE(read(header, 0, 3));
  expect_error(read(header, 0, 2), XD_ERROR_INTERNAL, "rank 2");
  for (const unsigned kind : {0u, 4u, 0x80000001u}) {
    LlRemoteHeader other = header;
    other.kind = static_cast<LlRemoteKind>(kind);
    expect_error(read(other, 0, 3), XD_ERROR_INTERNAL, "rank 3 has sent a message");
  }
  std::vector<std::byte> cut(sizeof(header) - 1);
  expect_error(error_of([&] { LlRemoteMessage::read(cut, 3); }), XD_ERROR_INTERNAL, "rank 3");
  const auto bytes = message_of(header, 64);
  const LlRemoteMessage message = LlRemoteMessage::read(bytes, 3);
  expect_error(error_of([&] { message.require_items(1, 32); }), XD_ERROR_INTERNAL,
               "rank 3 has sent a message that cannot be: it has more items than tokens");
  expect_error(error_of([&] { message.require_items(2, 16); }), XD_ERROR_INTERNAL,
               "its items have other sizes here");
}

}  // namespace
}  // namespace xd::ep
