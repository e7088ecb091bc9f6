// Packets over a TCP connection, which carries them between hosts: each is a 32-bit length and then
// its bytes. Nothing here blocks: what the connection does not take at once waits in a buffer.
#pragma once

#include <cstddef>
#include <memory>
#include <mutex>
#include <span>

#include "meet/packet.h"

namespace xd {

// The room that a rank's system has for a connection while the rank does not read. A rank is at
// most one round ahead of another, so it sends that two letters, a few small messages, and cards
// (comm/views/cards.h) that are a letter and a half, and the room is never full: a full one would
// look like the silence of a host.
inline constexpr int kStreamRoom = 4 * kMaxMeshPacket;

class PacketStream {
 public:
  // Takes all memory that it will ever need.
  PacketStream();

  // ---- Any thread; they allocate nothing ----

  // done: the packet is on its way, or waits for flush().
  Sent send(int fd, std::span<const std::byte> head, std::span<const std::byte> body) noexcept;
  // Sends as much of what waits as the connection takes.
  void flush(int fd) noexcept;
  bool has_unsent() noexcept;

  // ---- One thread ----

  // As receive_packet(); the bytes are good until the next call.
  Packet receive(int fd);

 private:
  static constexpr std::size_t kPrefixBytes = sizeof(std::uint32_t);
  static constexpr std::size_t kMaxFrame = kPrefixBytes + kMaxMeshPacket;
  // Small frames, such as a goodbye, have room behind a large one that waits.
  static constexpr std::size_t kSmallFrame = 1024;
  static constexpr std::size_t kRoom = kMaxFrame + 4 * kSmallFrame;

  bool push(int fd) noexcept;
  bool over(int error) noexcept;
  bool take_frame(Packet& packet);
  Packet end(int error);

  std::mutex mutex_;  // guards what sending uses
  std::unique_ptr<std::byte[]> out_;
  std::size_t unsent_ = 0;
  int send_error_ = 0;  // the error with which the connection ended, if a send has met it

  std::unique_ptr<std::byte[]> in_;
  std::size_t begin_ = 0, end_ = 0;  // bytes that have arrived and are not taken
};

}  // namespace xd
