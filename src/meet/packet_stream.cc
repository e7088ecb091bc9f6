#include "meet/packet_stream.h"

#include <sys/socket.h>
#include <sys/uio.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "base/error.h"
#include "base/tcp.h"

namespace xd {
namespace {

bool is_full(int error) { return error == EAGAIN || error == EWOULDBLOCK; }

// sendmsg() that never blocks, repeated when a signal has interrupted it.
ssize_t send_now(int fd, std::span<iovec> parts) {
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  ssize_t count = -1;
  do {
    count = ::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (count < 0 && errno == EINTR);
  return count;
}

}  // namespace

// The memory is not touched before it is used, so most of it is never there.
PacketStream::PacketStream()
    : out_(std::make_unique_for_overwrite<std::byte[]>(kRoom)),
      in_(std::make_unique_for_overwrite<std::byte[]>(kMaxFrame)) {}

// The system tells the error that has ended a connection once, to whichever call is first.
bool PacketStream::over(int error) noexcept {
  if (is_passing(error)) return false;
  if (send_error_ == 0) send_error_ = error;
  return true;
}

// Sends of what waits; false = the connection is over. The caller holds mutex_.
bool PacketStream::push(int fd) noexcept {
  while (unsent_ > 0) {
    iovec part{out_.get(), unsent_};
    const ssize_t count = send_now(fd, {&part, 1});
    if (count < 0) {
      if (is_full(errno) || !over(errno)) return true;
      // Nothing may follow a part of a frame.
      ::shutdown(fd, SHUT_RDWR);
      unsent_ = 0;
      return false;
    }
    unsent_ -= static_cast<std::size_t>(count);
    std::memmove(out_.get(), out_.get() + count, unsent_);
  }
  return true;
}

Sent PacketStream::send(int fd, std::span<const std::byte> head,
                        std::span<const std::byte> body) noexcept {
  const auto length = static_cast<std::uint32_t>(head.size() + body.size());
  const std::array<std::span<const std::byte>, 3> pieces{std::as_bytes(std::span(&length, 1)), head,
                                                         body};
  const std::size_t size = kPrefixBytes + length;
  const std::lock_guard lock(mutex_);
  if (!push(fd)) return Sent::closed;
  std::size_t sent = 0;
  if (unsent_ == 0) {
    std::array<iovec, 3> parts;
    std::ranges::transform(pieces, parts.begin(), [](auto piece) {
      return iovec{const_cast<std::byte*>(piece.data()), piece.size()};
    });
    const ssize_t count = send_now(fd, parts);
    if (count < 0 && !is_full(errno)) return over(errno) ? Sent::closed : Sent::refused;
    sent = count < 0 ? 0 : static_cast<std::size_t>(count);
  } else if (unsent_ + size > (size > kSmallFrame ? kMaxFrame : kRoom)) {
    return Sent::full;
  }
  for (const auto piece : pieces) {
    const std::size_t skipped = std::min(sent, piece.size());
    std::ranges::copy(piece.subspan(skipped), out_.get() + unsent_);
    unsent_ += piece.size() - skipped;
    sent -= skipped;
  }
  return Sent::done;
}

void PacketStream::flush(int fd) noexcept {
  const std::lock_guard lock(mutex_);
  push(fd);
}

bool PacketStream::has_unsent() noexcept {
  const std::lock_guard lock(mutex_);
  return unsent_ > 0;
}

// True if a whole frame has arrived, or one that no rank sends.
bool PacketStream::take_frame(Packet& packet) {
  if (end_ - begin_ < kPrefixBytes) return false;
  std::uint32_t length = 0;
  std::memcpy(&length, in_.get() + begin_, sizeof(length));
  if (length < sizeof(MeshHeader) || length > kMaxMeshPacket) {
    packet.kind = Packet::Kind::malformed;
    return true;
  }
  if (end_ - begin_ < kPrefixBytes + length) return false;
  packet.kind = Packet::Kind::data;
  packet.bytes = {in_.get() + begin_ + kPrefixBytes, length};
  begin_ += kPrefixBytes + length;
  return true;
}

Packet PacketStream::receive(int fd) {
  Packet packet;
  while (!take_frame(packet)) {
    std::memmove(in_.get(), in_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    const ssize_t count = ::recv(fd, in_.get() + end_, kMaxFrame - end_, MSG_DONTWAIT);
    if (count == 0) return end(0);
    if (count < 0 && (is_full(errno) || is_passing(errno))) return packet;
    if (count < 0 && errno != EINTR) return end(errno);
    if (count > 0) end_ += static_cast<std::size_t>(count);
  }
  return packet;
}

Packet PacketStream::end(int error) {
  const std::lock_guard lock(mutex_);
  Packet packet;
  packet.kind = Packet::Kind::end;
  packet.silent = is_silence(error) || is_silence(send_error_);
  return packet;
}

}  // namespace xd
