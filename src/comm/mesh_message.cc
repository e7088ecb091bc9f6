#include "comm/mesh_message.h"

#include "comm/mesh.h"

namespace xd {

std::size_t max_mesh_packet_bytes() { return sizeof(MeshHeader) + Mesh::kMaxBlob; }

std::optional<MeshMessage> decode_mesh_packet(std::span<const std::byte> packet,
                                              bool has_descriptor) {
  WireReader in(packet);
  const MeshMessage message{in.take<MeshHeader>(), in.rest()};
  const MeshHeader& header = message.header;
  if (!in.ok() || message.blob.size() > Mesh::kMaxBlob) return std::nullopt;
  if (header.has_descriptor != (has_descriptor ? 1U : 0U)) return std::nullopt;
  if (header.type == MeshMessageType::exchange) return message;
  const bool bare = !has_descriptor && header.round == 0;
  if (header.type == MeshMessageType::failure) {
    return bare && message.blob.size() <= kMaxFailureText ? std::optional(message) : std::nullopt;
  }
  const bool known =
      header.type == MeshMessageType::goodbye || header.type == MeshMessageType::abort;
  return bare && known && message.blob.empty() ? std::optional(message) : std::nullopt;
}

}  // namespace xd
