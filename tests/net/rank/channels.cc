#include "net/rank/channels.h"

#include <cstring>

namespace xd::test {
namespace {

constexpr std::size_t kRow = 100'000;
constexpr std::uint32_t kPuts = 0, kSwaps = 1;

std::byte value(int rank, int round) { return static_cast<std::byte>(7 * rank + round + 1); }

}  // namespace

std::string outcome(xd_status status) {
  if (status == XD_SUCCESS) return "fine";
  return std::string(xd_status_name(status)) + " " + xd_last_error();
}

// Of the memory, row r is for what comes from rank r; the row behind all is sent.
std::string RankChannels::make() {
  const std::size_t bytes = (ranks_.size() + 1) * kRow;
  if (memory_ == nullptr) {
    if (const auto status = xd_mem_grow(comm_, bytes + 4096); status != XD_SUCCESS)
      return outcome(status);
    void* memory = nullptr;
    if (const auto status = xd_mem_alloc(comm_, bytes, &memory); status != XD_SUCCESS)
      return outcome(status);
    memory_ = static_cast<std::byte*>(memory);
  }
  for (int other = 0; other < static_cast<int>(ranks_.size()); ++other) {
    const int peer = rank_ ^ other;  // the peer names this rank as well
    xd_channel* made = nullptr;
    if (const auto status = xd_channel_create(comm_, peer, memory_, bytes, 2, &made);
        status != XD_SUCCESS)
      return outcome(status);
    to(peer) = {.channel = decltype(ToRank::channel)(made)};
  }
  return "fine";
}

std::string RankChannels::put(int peer) {
  return outcome(xd_channel_put(to(peer).channel.get(), 0, memory_, 8, kPuts));
}

std::string RankChannels::wait(int peer) {
  const auto status = xd_channel_wait(to(peer).channel.get(), kPuts, to(peer).heard[kPuts] + 1);
  if (status == XD_SUCCESS) ++to(peer).heard[kPuts];
  return outcome(status);
}

std::string RankChannels::ask(int peer) {
  std::int32_t reached = 0;
  const auto status =
      xd_channel_test(to(peer).channel.get(), kPuts, to(peer).heard[kPuts] + 1, &reached);
  if (status != XD_SUCCESS) return outcome(status);
  if (reached == 0) return "not yet";
  ++to(peer).heard[kPuts];
  return "fine";
}

std::string RankChannels::flush(int peer) {
  return outcome(xd_channel_flush(to(peer).channel.get()));
}

std::string RankChannels::swap(int peer, int rounds) {
  std::vector<int> peers;
  for (int r = 0; r < static_cast<int>(ranks_.size()); ++r)
    if (peer < 0 || r == peer) peers.push_back(r);
  for (int round = 0; round < rounds; ++round)
    if (const std::string failed = swap_once(peers, round); failed != "fine")
      return failed + " in round " + std::to_string(round);
  return "fine";
}

// A rank writes into a peer's row again when it has the peer's word, in slot 0, that it was read.
std::string RankChannels::swap_once(const std::vector<int>& peers, int round) {
  std::byte* const row = memory_ + ranks_.size() * kRow;
  std::memset(row, static_cast<int>(value(rank_, round)), kRow);
  std::string failed = "fine";
  const auto each = [&](auto&& call) {
    for (const int peer : peers)
      if (failed == "fine") failed = call(peer);
  };
  each([&](int peer) {
    return outcome(xd_channel_put(to(peer).channel.get(), static_cast<std::size_t>(rank_) * kRow,
                                  row, kRow, kSwaps));
  });
  each([&](int peer) { return hear(peer, round); });
  each([&](int peer) {
    return outcome(xd_channel_put(to(peer).channel.get(), 0, nullptr, 0, kPuts));
  });
  each([&](int peer) { return wait(peer); });
  each([&](int peer) { return flush(peer); });
  return failed;
}

std::string RankChannels::hear(int peer, int round) {
  ToRank& from = to(peer);
  const auto status = xd_channel_wait(from.channel.get(), kSwaps, ++from.heard[kSwaps]);
  if (status != XD_SUCCESS) return outcome(status);
  const std::byte* const row = memory_ + static_cast<std::size_t>(peer) * kRow;
  for (std::size_t i = 0; i < kRow; ++i)
    if (row[i] != value(peer, round))
      return "byte " + std::to_string(i) + " of rank " + std::to_string(peer) + " is " +
             std::to_string(static_cast<int>(row[i]));
  return "fine";
}

}  // namespace xd::test
