#include "meet/packet.h"

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/error.h"

namespace xd {
namespace {

struct LinkAddress {
  sockaddr_un storage{};
  socklen_t size = 0;

  const sockaddr* get() const { return reinterpret_cast<const sockaddr*>(&storage); }
};

// The name is abstract: the first byte of the path is zero, and the size counts.
LinkAddress address_of(const Tag& name) {
  std::string path(1, '\0');
  path += "crossdock-";
  for (const unsigned char byte : name) {
    path += "0123456789abcdef"[byte >> 4];
    path += "0123456789abcdef"[byte & 15];
  }
  LinkAddress address;
  address.storage.sun_family = AF_UNIX;
  std::memcpy(address.storage.sun_path, path.data(), path.size());
  address.size = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + path.size());
  return address;
}

UniqueFd link_socket() {
  return UniqueFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
}

// Takes all descriptors out of a received message, so that none is left open unnoticed.
int take_descriptors(msghdr& message, UniqueFd& first) {
  int count = 0;
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const std::size_t bytes = part->cmsg_len - CMSG_LEN(0);
    for (std::size_t at = 0; at + sizeof(int) <= bytes; at += sizeof(int)) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + at, sizeof(fd));
      UniqueFd owner(fd);
      if (count++ == 0) first = std::move(owner);
    }
  }
  return count;
}

// A recvmsg() that never blocks. A peer that closes its end with unread messages makes the kernel
// report ECONNRESET once, before messages that the peer had sent, which may include its goodbye. So
// only a second ECONNRESET in a row ends the connection.
ssize_t receive_now(int fd, msghdr& message, int flags) {
  bool reset = false;
  while (true) {
    const ssize_t count = ::recvmsg(fd, &message, flags | MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
    if (count >= 0) return count;
    if (errno == ECONNRESET && !reset) {
      reset = true;
    } else if (errno != EINTR) {
      return count;
    }
  }
}

}  // namespace

UniqueFd listen_for_links(const Tag& name, int backlog) {
  UniqueFd fd = link_socket();
  if (!fd) fail_errno("socket", errno);
  const LinkAddress address = address_of(name);
  if (::bind(fd.get(), address.get(), address.size) != 0)
    fail_errno("bind of an abstract Unix socket", errno);
  if (::listen(fd.get(), backlog) != 0) fail_errno("listen on an abstract Unix socket", errno);
  return fd;
}

UniqueFd connect_link(const Tag& name) {
  UniqueFd fd = link_socket();
  if (!fd) return fd;
  const LinkAddress address = address_of(name);
  if (::connect(fd.get(), address.get(), address.size) == 0) return fd;
  const int error = errno;
  fd.reset();
  errno = error;
  return fd;
}

pid_t peer_process(int fd) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 ? credentials.pid : 0;
}

bool peer_has_our_user(int fd) {
  ucred credentials{};
  socklen_t size = sizeof(credentials);
  return ::getsockopt(fd, SOL_SOCKET, SO_PEERCRED, &credentials, &size) == 0 &&
         (credentials.uid == ::geteuid() || credentials.uid == 0);
}

Sent send_packet(int fd, std::span<const std::byte> head, std::span<const std::byte> body,
                 int passed) noexcept {
  std::array<iovec, 2> parts{iovec{const_cast<std::byte*>(head.data()), head.size()},
                             iovec{const_cast<std::byte*>(body.data()), body.size()}};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = parts.data();
  message.msg_iovlen = parts.size();
  if (passed >= 0) {
    message.msg_control = control.data();
    message.msg_controllen = control.size();
    cmsghdr* part = CMSG_FIRSTHDR(&message);
    part->cmsg_level = SOL_SOCKET;
    part->cmsg_type = SCM_RIGHTS;
    part->cmsg_len = CMSG_LEN(sizeof(int));
    std::memcpy(CMSG_DATA(part), &passed, sizeof(passed));
  }
  while (::sendmsg(fd, &message, MSG_DONTWAIT | MSG_NOSIGNAL) < 0) {
    if (errno == EINTR) continue;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return Sent::full;
    if (errno == EPIPE || errno == ECONNRESET) return Sent::closed;
    return Sent::refused;
  }
  return Sent::done;
}

bool has_packet(int fd) {
  std::byte first;
  iovec part{&first, sizeof(first)};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  return receive_now(fd, message, MSG_PEEK) > 0;
}

Packet receive_packet(int fd, std::span<std::byte> buffer) {
  iovec part{buffer.data(), buffer.size()};
  alignas(cmsghdr) std::array<char, CMSG_SPACE(sizeof(int))> control{};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  const ssize_t count = receive_now(fd, message, 0);

  Packet packet;
  if (count < 0) {
    const bool later = errno == EAGAIN || errno == EWOULDBLOCK;
    if (!later && errno != ECONNRESET) fail_errno("recvmsg from a peer", errno);
    packet.kind = later ? Packet::Kind::nothing_yet : Packet::Kind::end;
    return packet;
  }
  const int descriptors = take_descriptors(message, packet.fd);
  // There is room for one descriptor, so a message that was cut short without any had one that
  // could not be opened here.
  packet.fd_discarded = descriptors == 0 && (message.msg_flags & MSG_CTRUNC) != 0;
  // No message of the mesh is empty, so no bytes mean the end of the connection.
  if (count == 0 && descriptors == 0 && !packet.fd_discarded) {
    packet.kind = Packet::Kind::end;
  } else if (count == 0 || descriptors > 1 || (message.msg_flags & MSG_TRUNC) != 0 ||
             (descriptors == 1 && (message.msg_flags & MSG_CTRUNC) != 0)) {
    packet.kind = Packet::Kind::malformed;
  } else {
    packet.kind = Packet::Kind::data;
    packet.bytes = buffer.first(static_cast<std::size_t>(count));
  }
  return packet;
}

std::optional<MeshMessage> decode_mesh_packet(std::span<const std::byte> packet,
                                              bool has_descriptor) {
  WireReader in(packet);
  const MeshMessage message{in.take<MeshHeader>(), in.rest()};
  const MeshHeader& header = message.header;
  if (!in.ok() || message.blob.size() > kMaxMeshBlob) return std::nullopt;
  if (header.has_descriptor != (has_descriptor ? 1U : 0U)) return std::nullopt;
  if (header.source < 0) return std::nullopt;
  const bool failed = header.type == MeshMessageType::failure;
  if (failed ? header.status <= XD_SUCCESS || header.status > XD_ERROR_INTERNAL
             : header.status != XD_SUCCESS)
    return std::nullopt;
  if (header.type == MeshMessageType::exchange) return message;
  if (has_descriptor || (header.round != 0 && header.type != MeshMessageType::lost))
    return std::nullopt;
  std::size_t most = 0;
  switch (header.type) {
    case MeshMessageType::failure:
      most = kMaxFailureText;
      break;
    case MeshMessageType::report:
      most = kMaxReport;
      break;
    case MeshMessageType::goodbye:
    case MeshMessageType::abort:
      break;
    case MeshMessageType::lost:
      if (header.round > INT32_MAX) return std::nullopt;
      break;
    default:
      return std::nullopt;
  }
  return message.blob.size() <= most ? std::optional(message) : std::nullopt;
}

}  // namespace xd
