#include "ep/bulk/chunk.h"

#include <algorithm>
#include <cstring>

#include "base/error.h"
#include "comm/remote/network.h"
#include "ep/plan/placement.h"
#include "net/engine.h"
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

// As much is under way to each neighbour as one may need of which all traffic goes there, but no
// more than the largest batch has, and than an engine can report at once: of each frame, at either
// end, that a chunk has come and one was sent, and likewise of its credit.
RemoteWindow remote_window(const Config& config, int most_neighbours, int most_frames) {
  constexpr std::size_t kKiB = 1 << 10, kFewest = 4, kUsualBytes = 4096 * kKiB;
  const Network::Frames usual = network().usual_frames();
  const std::size_t others = at(most_neighbours);
  constexpr std::size_t kWays = kDirections;
  const std::size_t reported =
      std::max(at(net::kEngineEvents) / (4 * kWays * others), at(kFewestDirectionFrames));
  const std::size_t most = std::min({at(most_frames), at(usual.most), reported});
  const auto frames_of = [&](std::size_t bytes, std::size_t frame_bytes) {
    return std::min(std::max(bytes / frame_bytes, kFewest), most);
  };
  std::size_t wish = usual.bytes / (others >= 64 ? 4 : others >= 32 ? 2 : 1);
  std::size_t bytes = kUsualBytes / others;  // of a direction at one end
  if (config.net_buffer_bytes != 0) {
    bytes = config.net_buffer_bytes / (2 * kWays * others);
    wish = std::clamp(bytes / frames_of(bytes, wish), 64 * kKiB, 512 * kKiB);
  }
  const std::size_t counts = CountLayout{config.experts, config.ranks}.size();
  const std::size_t longest = longest_remote_item(config, counts);
  const std::size_t least = sizeof(net::LinkHeader) + sizeof(RemoteHeader) + longest;
  // Memory of frames is a round number of bytes.
  const std::size_t frame = net::item_size(std::max(wish, least) - sizeof(net::LinkHeader));
  const std::size_t batch = at(config.max_tokens) / ((frame - sizeof(RemoteHeader)) / longest) + 1;
  const std::size_t frames =
      std::min(frames_of(bytes, frame), std::max(batch, at(kFewestDirectionFrames)));
  return {.frames = static_cast<int>(frames), .frame_bytes = frame};
}

}  // namespace xd::ep
