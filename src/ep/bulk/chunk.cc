#include "ep/bulk/chunk.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/remote/network.h"
#include "ep/plan/placement.h"
#include "net/link_map.h"

namespace xd::ep {

void refuse_chunk(const RemoteHeader& header, std::size_t item_bytes, const char* why) {
  throw Error(XD_ERROR_INTERNAL,
              error_text("rank ", header.source, " has sent a chunk that cannot be: ", why,
                         " (kind ", static_cast<unsigned>(header.kind), ", ", header.items,
                         " items in ", item_bytes, " bytes, epoch ", header.epoch, ")"),
              header.source);
}

// A neighbour may be one operation ahead, but has sent no rows of it then: it has not seen this
// rank's entry.
RemoteHeader read_header(std::span<const std::byte> chunk, int from, std::uint64_t epoch) {
  RemoteHeader header{};
  if (chunk.size() >= sizeof(header)) std::memcpy(&header, chunk.data(), sizeof(header));
  const bool early = header.kind == RemoteKind::entry || header.kind == RemoteKind::counts;
  const bool in_step = header.epoch == epoch || (early && header.epoch == epoch + 1);
  const bool known = header.kind >= RemoteKind::entry && header.kind <= RemoteKind::answer;
  if (in_step && header.source == from && known) return header;
  throw Error(XD_ERROR_INTERNAL,
              error_text("rank ", from, " has sent a chunk of ", chunk.size(), " bytes: kind ",
                         static_cast<unsigned>(header.kind), " of rank ", header.source, ", epoch ",
                         header.epoch, "; expected epoch ", epoch),
              from);
}

void require_items(const RemoteHeader& header, std::span<const std::byte> items,
                   std::size_t bytes_each) {
  if (items.size() != header.items * bytes_each)
    refuse_chunk(header, items.size(), "its items have other sizes here");
}

std::size_t remote_frame_bytes(const Config& config, int num_machines) {
  constexpr std::size_t kKiB = 1 << 10, kLeast = 64 * kKiB, kMost = 512 * kKiB;
  const std::size_t frames =
      2 * std::size_t{kRemoteFrames} * at(num_machines - 1);  // both directions
  std::size_t wish = network().usual_frame_bytes();
  if (config.net_buffer_bytes != 0)
    wish = std::clamp<std::size_t>(config.net_buffer_bytes / frames, kLeast, kMost);
  wish -= sizeof(net::LinkHeader);  // so that memory of frames is a round number of bytes
  const std::size_t counts = CountLayout{config.experts, config.ranks}.size();
  return net::item_size(std::max(wish, sizeof(RemoteHeader) + longest_remote_item(config, counts)));
}

}  // namespace xd::ep
