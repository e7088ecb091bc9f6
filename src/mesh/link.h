// A connection to a peer: a Unix socket where the peer is on this host, which also passes
// descriptors, else TCP.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <string_view>
#include <utility>

#include "base/deadline.h"
#include "base/fd.h"
#include "mesh/packet.h"
#include "mesh/packet_stream.h"

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

// Sends every peer a message of the mesh from rank `source`. A peer that has gone needs no message;
// one whose connection is full gets it if there is room before the deadline, which is one for all.
// Allocates nothing.
void tell_all(std::span<const MeshLink> links, int source, MeshMessageType type,
              std::string_view text = {},
              const Deadline& deadline = Deadline::after_ms(0)) noexcept;
// Tells the exception in flight as the reason why this rank cannot go on. Call it inside a catch
// block only.
void tell_failure(std::span<const MeshLink> links, int source) noexcept;

// Ends what this rank says over TCP, and waits until the peers' systems have all of it: a
// connection that is closed sooner, with messages of the peer unread, takes what is on its way
// along.
void finish_saying(std::span<const MeshLink> links, const Deadline& deadline) noexcept;

}  // namespace xd
