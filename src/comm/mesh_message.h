// The messages that travel over the mesh, one per packet.
#pragma once

#include <cstdint>
#include <optional>
#include <span>

#include "bootstrap/wire.h"

namespace xd {

enum class MeshMessageType : std::uint32_t {
  exchange = 1,
  goodbye = 2,
  abort = 3,
  failure = 4  // a goodbye with its reason, the blob: this rank cannot go on
};
inline constexpr std::size_t kMaxFailureText = 512;

struct MeshHeader {
  MeshMessageType type;
  std::uint32_t has_descriptor;  // exchange only
  std::uint64_t round;           // exchange only: which all_gather, counted from 0
};

struct MeshMessage {
  MeshHeader header;
  std::span<const std::byte> blob;  // inside the packet
};

std::size_t max_mesh_packet_bytes();

// Empty if no rank of this version sends such a packet.
std::optional<MeshMessage> decode_mesh_packet(std::span<const std::byte> packet,
                                              bool has_descriptor);

}  // namespace xd
