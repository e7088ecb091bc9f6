// Messages between ranks of a group on different machines: chunks of the links (net/links.h), each
// with a header and items behind it. docs/internals/machines.md has the protocol.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

#include "base/math.h"
#include "ep/bulk/desk.h"
#include "ep/bulk/wire.h"
#include "ep/plan/config.h"
#include "net/link_map.h"

namespace xd::ep {

enum class RemoteKind : std::uint32_t {
  entry = 1,    // one item: the source's Record
  counts = 2,   // items are the source's counts, 32 bits each
  words = 3,    // items: WordsItem
  rows = 4,     // items: see RowsLayout
  request = 5,  // items: RequestItem and codes
  answer = 6,   // items: see AnswerLayout
};

// Words, rows and requests of an operation, and answers, are the chunks that desks count (desk.h).
struct RemoteHeader {
  std::uint64_t epoch;
  RemoteKind kind;
  std::int32_t source;  // the rank that has sent it
  std::uint32_t items;
  // How many chunks are counted: in an entry those that follow it to this relay, or kUnknownChunks,
  // and in each of them as well. CUDA: not in entries; in words 1 in the last one, else 0.
  std::uint32_t chunks;
  std::uint32_t tokens;         // CUDA, rows: the last token in it, and 1
  std::uint32_t found_missing;  // CUDA: 1 = the source has not found memory of a near rank
};
static_assert(sizeof(RemoteHeader) == 32 && std::has_unique_object_representations_v<RemoteHeader>);

// Throws INTERNAL, naming the sender. A chunk may have been damaged by anyone who can write into a
// rank's region, so all of it is looked at before it is used as a number of bytes or as a place.
[[noreturn]] void refuse_chunk(const RemoteHeader& header, std::size_t item_bytes, const char* why);

// The header of a chunk that `from` has sent to a rank in operation `epoch`.
RemoteHeader read_header(std::span<const std::byte> chunk, int from, std::uint64_t epoch);

// Refuses items that are not each of `bytes_each`, or not in all what the header says.
void require_items(const RemoteHeader& header, std::span<const std::byte> items,
                   std::size_t bytes_each);

// A source's words for one rank of the relay's machine, which go into a part of its group memory.
enum class RemoteWords : std::uint32_t { list = 0, kept = 1, items = 2, listed = 3 };
struct WordsItem {
  RemoteWords area;
  std::int32_t owner;
  std::uint32_t first, count;  // of 32 bits each; they follow
};

// A token's row: the codes of all its choices, as its plan has them, weights, row and scales. The
// relay decodes them as the source does, and takes those of its own machine's ranks.
struct RowsLayout {
  int topk;
  bool weights;
  std::size_t row_bytes, scale_bytes;

  constexpr std::size_t weights_at() const { return at(topk) * sizeof(std::uint32_t); }
  constexpr std::size_t row_at() const {
    return net::item_size(weights_at() + (weights ? at(topk) * sizeof(float) : 0));
  }
  constexpr std::size_t scales_at() const { return row_at() + row_bytes; }
  constexpr std::size_t item_bytes() const { return net::item_size(scales_at() + scale_bytes); }
};

// Asks for the sum over a token's rows on one declared host of the relay's machine. The codes of
// its choices follow.
struct RequestItem {
  std::uint32_t token, place;  // both come back in the answer; place: see RemoteSums
  std::int32_t host;
  std::uint32_t form;  // of an answer: an AnswerForm; in requests 0
};
constexpr std::size_t request_bytes(int topk) {
  return sizeof(RequestItem) + net::item_size(at(topk) * sizeof(std::uint32_t));
}

// How an answer has its sum: as a row of the payload type, or as combine's wire has rows.
enum class AnswerForm : std::uint32_t { payload = 0, wire = 1 };

// The request, gradients of the choices' weights, and the sum. `row_bytes`: of the answer's form.
struct AnswerLayout {
  int topk;  // 0: no gradients
  std::size_t row_bytes;

  constexpr std::size_t row_at() const {
    return sizeof(RequestItem) + net::item_size(at(topk) * sizeof(float));
  }
  constexpr std::size_t item_bytes() const { return row_at() + net::item_size(row_bytes); }
};

// The longest item of a group; the counts of a rank are one item here.
inline std::size_t longest_remote_item(const Config& config, std::size_t counts) {
  const RowsLayout rows{.topk = config.max_topk,
                        .weights = true,
                        .row_bytes = config.max_row_bytes,
                        .scale_bytes = config.scale_room()};
  const AnswerLayout answer{.topk = config.max_topk, .row_bytes = config.max_wire_bytes()};
  return std::max({rows.item_bytes(), answer.item_bytes(), request_bytes(config.max_topk),
                   net::item_size(counts * sizeof(std::uint32_t)), sizeof(Record)});
}

// The frames of a group's links, for each neighbour and direction at either end. Equal on all
// ranks, as they go by the config and the most neighbours that any rank has.
struct RemoteWindow {
  int frames;
  std::size_t frame_bytes;  // room for the longest item, or for many
};
// `most_frames`: the fewest, where bytes that are under way do not lie in frames.
RemoteWindow remote_window(const Config& config, int most_neighbours, int most_frames);

}  // namespace xd::ep
