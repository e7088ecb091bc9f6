// The messages between ranks, one in each packet, and the Unix sockets that carry them on one host:
// SOCK_SEQPACKET (whole messages, in order, and an end that is noticed), abstract names (nothing is
// left in the file system), non-blocking, close-on-exec.
#pragma once

#include <crossdock/status.h>
#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "base/fd.h"
#include "base/wire.h"
#include "meet/handshake.h"

namespace xd {

// ---- Messages ----

enum class MeshMessageType : std::uint32_t {
  exchange = 1,
  goodbye = 2,
  abort = 3,
  failure = 4,  // a goodbye with its reason, status and blob: this rank cannot go on
  // Between hosts only:
  report = 5,  // bytes for MeshEvents::on_report()
  lost = 6     // `source` is lost, and its process or host with it
};
inline constexpr std::size_t kMaxFailureText = 512;
inline constexpr std::size_t kMaxReport = 3072;
inline constexpr std::size_t kMaxMeshBlob = 32768;

struct MeshHeader {
  MeshMessageType type;
  std::uint32_t has_descriptor;  // exchange only
  // exchange: which all_gather, counted from 0; lost: the silence in milliseconds after which its
  // host was given up, 0 = its process has ended.
  std::uint64_t round;
  std::int32_t source;               // the rank that says it; a relay passes it on unchanged
  std::int32_t status = XD_SUCCESS;  // failure: of the reason
};

inline constexpr std::size_t kMaxMeshPacket = sizeof(MeshHeader) + kMaxMeshBlob;

struct MeshMessage {
  MeshHeader header;
  std::span<const std::byte> blob;  // inside the packet

  std::string_view text() const {
    return {reinterpret_cast<const char*>(blob.data()), blob.size()};
  }
};

// The status of a rank that has to give up for a peer's failure.
inline xd_status status_after(const MeshHeader& failure) {
  return failure.status == XD_ERROR_PEER_LOST ? XD_ERROR_PEER_LOST : XD_ERROR_MISMATCH;
}

inline std::span<const std::byte> bytes_of(const MeshHeader& header) {
  return std::as_bytes(std::span(&header, 1));
}

// Returns nothing if no rank of this version sends such a packet.
std::optional<MeshMessage> decode_mesh_packet(std::span<const std::byte> packet,
                                              bool has_descriptor);

// ---- Sockets ----

// Listens under an abstract name. Throws SYSTEM.
UniqueFd listen_for_links(const Tag& name, int backlog);

// Connects. Returns no descriptor, with errno set, if the listener has no room at the moment
// (EAGAIN) or is not there, or this process has no descriptor.
UniqueFd connect_link(const Tag& name);

// The process at the other end, by its number here; 0 = it has none here, or cannot be known.
pid_t peer_process(int fd);

// True if the kernel vouches that the process at the other end runs as this user, or as root.
bool peer_has_our_user(int fd);

enum class Sent {
  done,
  full,
  closed,
  refused  // refused by the system; errno has the reason
};

// Sends one packet, head and body, with a duplicate of descriptor `passed` unless it is -1. Never
// blocks, never throws.
Sent send_packet(int fd, std::span<const std::byte> head, std::span<const std::byte> body = {},
                 int passed = -1) noexcept;

struct Packet {
  enum class Kind { nothing_yet, end, malformed, data };
  Kind kind = Kind::nothing_yet;
  std::span<const std::byte> bytes;  // in the caller's buffer
  UniqueFd fd;                       // the descriptor that came with it
  bool fd_discarded = false;         // a descriptor came, and this process had no room for it
  bool silent = false;               // the end: the other host has been silent for too long
};

// True if a packet is there to be received.
bool has_packet(int fd);

// Receives one packet. It is malformed if it is larger than the buffer or has more than one
// descriptor. Throws SYSTEM if the system refuses to receive.
Packet receive_packet(int fd, std::span<std::byte> buffer);

}  // namespace xd
