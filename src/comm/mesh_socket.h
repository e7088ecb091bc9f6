// Unix sockets of the mesh: SOCK_SEQPACKET (whole messages, in order, and an end that is noticed),
// abstract names (nothing is left in the file system), non-blocking, close-on-exec.
#pragma once

#include <span>

#include "base/fd.h"
#include "bootstrap/secret.h"
#include "bootstrap/wire.h"

namespace xd {

// Throws SYSTEM.
UniqueFd listen_for_links(const Tag& name, int backlog);

// No descriptor, with errno set, if the listener has no room at the moment (EAGAIN) or is not
// there.
UniqueFd connect_link(const Tag& name);

// Whether the kernel vouches that the process at the other end runs as this user, or as root.
bool peer_has_our_user(int fd);

enum class Sent { done, full, closed };

// Sends one packet, head and body, with a duplicate of descriptor `passed` unless it is -1. Never
// blocks. Throws SYSTEM if the system refuses it for another reason.
Sent send_packet(int fd, std::span<const std::byte> head, std::span<const std::byte> body = {},
                 int passed = -1);

struct Packet {
  enum class Kind { nothing_yet, end, malformed, data };
  Kind kind = Kind::nothing_yet;
  std::span<const std::byte> bytes;  // in the caller's buffer
  UniqueFd fd;                       // the descriptor that came with it
};

// Whether a packet is there to be received.
bool has_packet(int fd);

// Receives one packet. Malformed: larger than the buffer, more than one descriptor, or one that
// this process has no room for.
Packet receive_packet(int fd, std::span<std::byte> buffer);

}  // namespace xd
