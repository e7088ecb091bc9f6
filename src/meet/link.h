// A connection to a peer: a Unix socket where the peer is on this host, which also passes
// descriptors, else TCP.
#pragma once

#include <array>
#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "base/deadline.h"
#include "base/error.h"
#include "base/fd.h"
#include "meet/packet.h"
#include "meet/packet_stream.h"

namespace xd {

class MeshLink {
 public:
  MeshLink() = default;  // no connection
  explicit MeshLink(UniqueFd unix_socket) : fd_(std::move(unix_socket)) {}
  static MeshLink over_tcp(UniqueFd socket) {
    MeshLink link(std::move(socket));
    link.stream_ = std::make_unique<PacketStream>();
    return link;
  }

  explicit operator bool() const { return static_cast<bool>(fd_); }
  int get() const { return fd_.get(); }
  bool is_tcp() const { return stream_ != nullptr; }

  // As send_packet(). Any thread; allocates nothing. Over TCP no descriptor is passed, and a packet
  // that is `done` may still wait for flush().
  Sent send(std::span<const std::byte> head, std::span<const std::byte> body = {},
            int passed = -1) const noexcept {
    return stream_ ? stream_->send(get(), head, body) : send_packet(get(), head, body, passed);
  }
  bool has_unsent() const noexcept { return stream_ && stream_->has_unsent(); }
  void flush() const noexcept {
    if (stream_) stream_->flush(get());
  }

  // As receive_packet(). One thread; the bytes are good until the next call.
  Packet receive(std::span<std::byte> buffer) const {
    return stream_ ? stream_->receive(get()) : receive_packet(get(), buffer);
  }

 private:
  UniqueFd fd_;
  std::unique_ptr<PacketStream> stream_;  // TCP only
};

// The time that a rank that gives up takes to tell other hosts.
inline constexpr int kFarewellMs = 500;

// Sends every peer a message of the mesh. A peer that has gone needs no message; one whose
// connection is full gets it if there is room before the deadline, which is one for all. Allocates
// nothing.
void tell_all(std::span<const MeshLink> links, const MeshHeader& header, std::string_view text = {},
              const Deadline& deadline = Deadline::after_ms(0)) noexcept;

// The reason why a rank cannot go on.
class FailureWords {
 public:
  FailureWords() noexcept;  // of the exception in flight: inside a catch block only
  xd_status status() const { return error_.status; }
  int error_number() const { return error_.error_number; }
  const char* text() const { return text_.data(); }
  // Sends them from rank `source`.
  void tell(std::span<const MeshLink> links, int source) const noexcept;

 private:
  std::array<char, kMaxFailureText> text_;
  Caught error_;
};

// Ends what this rank says over TCP, and waits until the peers' systems have all of it: a
// connection that is closed sooner, with messages of the peer unread, takes what is on its way
// along.
void finish_saying(std::span<const MeshLink> links, const Deadline& deadline) noexcept;

}  // namespace xd
