// The words and rows that the ranks of a group write into one another's memory, and their places.
//
//   area of rank r      written by        means
//   entry, done         src, once per op  the turns of the group's operations: see turn/entry.h
//   views[src]          src, once per     where losses are outlived: see turn/host/turn.h
//                       view
//   counts[stage][src]  src, in prepare   src's counts; each word carries the epoch's low half
//   kept[src]           src, in prepare   RANK_MAJOR under DROP: pairs per local expert of r that
//                                        src still sends after drops; before its done flag
//   lists[src]          src, in prepare   EXPERT_MAJOR: src's rows here, token by token (PlanView);
//                                        before its done flag
//   scales, weights,    peers             staging for what lies beside receive rows, where it lies
//   indices                              outside symmetric memory, or scales have other strides
//   rows                peers             staging for receive rows outside symmetric memory
//
// Where the executor keeps them (Keeps in ep/plan/config.h):
//   chunk[src][c]      src, once per op  all that src brings here in this operation for the tokens
//                                        of chunk c has landed (ChunkFlags). Of a sum in parts
//                                        in its last part alone: its earlier ones end with `done`
//   listed[src]        src, in prepare   lengths of what follows: items, rows
//   items[src]         src, in prepare   its tokens with rows here (ItemWord); before its done flag
//   partials           peers, in combine partial sums of r's tokens: row cell (PlanView). The same
//                                        memory as `rows`, as no operation uses both
//
// Nothing is ever cleared: every flag and word holds the epoch that it belongs to. Counts have
// stages as the turns have (turn::stage_of); all else is written again only when this rank's record
// of the next operation is there, which says that it has ended the one before.
//
// Order, for every flag: its writer stores what it announces, then the flag with release; a reader
// loads the flag with acquire, then reads. Count words need no order: each is whole by itself.
#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

#include "base/dtype.h"
#include "base/layout.h"
#include "ep/plan/config.h"
#include "ep/plan/count_word.h"
#include "ep/plan/placement.h"
#include "turn/entry.h"
#include "turn/peer_address.h"

namespace xd::ep {

enum RecordFlags : std::uint8_t {
  kHasScales = 1 << 0,
  kHasWeights = 1 << 1,
  kHasIndices = 1 << 2,
  kHasRows = 1 << 4,
  kByteScales = 1 << 5,  // given scales of one byte each, not float32
  kHasGradWeights = 1 << 6,
  kWideIndices = 1 << 7,  // recv_topk_idx is int64 here: the owner's choice, not compared
};

// The scales that dispatch carries beside its rows, in 32 bits: the way of quantising above the
// bytes of a scale row, which are at most 2^26.
struct ScaleRow {
  xd_ep_quantise quantise;
  std::uint32_t bytes;

  static constexpr int kByteBits = 27;
  constexpr std::uint32_t word() const {
    return static_cast<std::uint32_t>(quantise) << kByteBits | bytes;
  }
  static constexpr ScaleRow of(std::uint32_t word) {
    return {static_cast<xd_ep_quantise>(word >> kByteBits), word & ((1u << kByteBits) - 1)};
  }
};

// The sizes of a new plan beside its alignment, in 32 bits.
struct ChoiceShape {
  int topk;
  int parts;  // 0 = one

  static constexpr int kTopkBits = 8;
  constexpr std::uint32_t word() const {
    return static_cast<std::uint32_t>(parts) << kTopkBits | static_cast<std::uint32_t>(topk);
  }
  static constexpr ChoiceShape of(std::uint32_t word) {
    return {static_cast<int>(word & ((1u << kTopkBits) - 1)), static_cast<int>(word >> kTopkBits)};
  }
};

// The record of a rank that enters an operation. Everything but the places, the number of rows and
// kWideIndices must be equal on all ranks.
struct Record {
  turn::Call call{};       // an xd_ep_operation
  std::uint8_t dtype = 0;  // a DType
  std::uint8_t flags = 0;
  std::uint32_t row_bytes = 0;  // prepare: alignment
  // dispatch: ScaleRow; combine: an xd_ep_wire; combine_bwd: bytes of a scale row; prepare:
  // ChoiceShape
  std::uint32_t extra = 0;
  std::uint32_t rows = 0;  // rows of each receive tensor
  // The plan's; where it leaves kPartBits free, plus the part. prepare and set_placement: the hash
  // of the table of slots.
  std::uint64_t fingerprint = 0;
  turn::PeerAddress rows_in{};     // receive rows that peers read or write
  turn::PeerAddress scales_in{};   // receive scales; combine_bwd with weights: expert_out
  turn::PeerAddress weights_in{};  // receive weights that peers read or write
  turn::PeerAddress extra_in{};    // dispatch: receive indices; combine_bwd: grad_weights
};

// True if two ranks that are in the same operation also agree about its arguments. Host and device
// ask it.
constexpr bool same_operation(const Record& a, const Record& b) {
  return a.fingerprint == b.fingerprint && a.dtype == b.dtype && a.row_bytes == b.row_bytes &&
         a.extra == b.extra && (a.flags & ~kWideIndices) == (b.flags & ~kWideIndices);
}

// A token of a source with rows here, as the source describes it: where its rows begin in the
// source's list, and its cell.
struct ItemWord {
  std::uint32_t start, cell;
};

struct ListedWord {
  std::uint32_t items, rows;
};

// Rows may be announced in chunks of tokens, which few tokens cut by columns into strips. Chunks
// depend on the operation, the number of the rank's tokens and the size of a row alone, so both
// sides agree about them whatever their grids are.
struct ChunkFlags {
  int most_tokens;  // in a chunk

  static constexpr int kFewestChunks = 512, kMostStrips = 8;
  static constexpr std::uint64_t kLeastStripBytes = 1024;

  constexpr int tokens_per_chunk(int tokens) const {
    const int wanted = (tokens + kFewestChunks - 1) / kFewestChunks;
    return wanted < 1 ? 1 : wanted > most_tokens ? most_tokens : wanted;
  }
  constexpr int count(int tokens) const {
    const int each = tokens_per_chunk(tokens);
    return (tokens + each - 1) / each;
  }
  // The number of strips of a chunk whose rows have `row_bytes` bytes: a power of two. Strip i of a
  // chunk has flag chunk * strips + i.
  constexpr int strips(int tokens, std::uint64_t row_bytes) const {
    int strips = 1;
    while (strips < kMostStrips && 2 * strips * count(tokens) <= kFewestChunks &&
           row_bytes >= 2 * kLeastStripBytes * static_cast<std::uint64_t>(strips)) {
      strips *= 2;
    }
    return strips;
  }
  // The most flags that any number of tokens up to `max_tokens` has.
  constexpr int bound(int max_tokens) const {
    const int small =
        max_tokens < kFewestChunks / kMostStrips ? max_tokens * kMostStrips : kFewestChunks;
    const int large = count(max_tokens);
    return small > large ? small : large;
  }
};
// A sender stops at the end of each chunk until the rows have landed. In a call with a part it
// sends only some of a chunk's tokens, so there are more of them. Receivers wait for partial sums
// one token at a time.
constexpr ChunkFlags sent_chunks(bool of_a_part = false) { return {of_a_part ? 16 : 8}; }
constexpr ChunkFlags summed_chunks() { return {2}; }

// Byte offsets inside the memory that a rank of a group shares.
struct GroupMap {
  turn::TurnMap turn;
  std::uint64_t views, counts, kept, chunk, listed, items, lists, scales, weights, indices, rows,
      end;

  // Partial sums, where the executor keeps some, take the place of staged rows.
  constexpr std::uint64_t partials() const { return rows; }

  // The words of a source's list: its length, then the rows.
  static std::uint64_t list_words(const Config& config) { return 1 + config.rows_per_source(); }

  static std::uint64_t cells_of(const Config& config) {
    return static_cast<std::uint64_t>(config.max_tokens) *
           static_cast<std::uint64_t>(config.most_cells_per_token());
  }

  // `config` is that of the rank whose memory this is. Areas that turns and kernels find in a
  // peer's memory by their own rank's map come first: their places do not depend on a rank's
  // capacity or experts.
  static GroupMap make(const Config& config) {
    LayoutCursor cursor;
    GroupMap map{};
    map.turn = turn::TurnMap::add<Record>(cursor, config.ranks);
    for (const Area& area : areas_of(config)) {
      map.*area.offset = cursor.add<std::byte>(area.bytes, area.alignment);
    }
    map.end = cursor.add<std::byte>(0, 256);
    return map;
  }

 private:
  using Offset = std::uint64_t GroupMap::*;
  struct Area {
    Offset offset;
    std::uint64_t bytes;
    std::uint64_t alignment;
  };

  // In the order in which they lie; an area that is not kept has no bytes.
  static std::array<Area, 11> areas_of(const Config& c) {
    const Keeps& keeps = c.keeps;
    const auto ranks = static_cast<std::uint64_t>(c.ranks);
    const auto local = static_cast<std::uint64_t>(c.most_local_experts());
    const auto tokens = static_cast<std::uint64_t>(c.max_tokens);
    const auto capacity = static_cast<std::uint64_t>(c.capacity);
    const auto chunks = static_cast<std::uint64_t>(summed_chunks().bound(c.max_tokens));
    const bool cuts_pairs = !c.layout.row_per_expert && c.overflow == XD_EP_OVERFLOW_DROP;
    const std::uint64_t values = capacity * c.weights_per_row();
    const std::uint64_t rows = std::max(c.staging ? capacity * c.max_row_bytes : 0,
                                        keeps.partials ? cells_of(c) * c.max_wire_bytes() : 0);
    const auto bytes_if = [](bool kept, std::uint64_t count, std::uint64_t size) {
      return kept ? count * size : 0;
    };
    constexpr std::uint64_t kViewCell = sizeof(turn::ViewCell);
    const std::uint64_t counts = turn::kStages * ranks * CountLayout{c.experts, c.ranks}.size();
    return {{{&GroupMap::views, bytes_if(c.outlives_losses, ranks, kViewCell), kViewCell},
             {&GroupMap::counts, counts * sizeof(std::uint64_t), 64},
             {&GroupMap::kept, bytes_if(cuts_pairs, ranks * local, sizeof(std::uint32_t)), 64},
             {&GroupMap::chunk, bytes_if(keeps.chunks, ranks * chunks, sizeof(std::uint64_t)), 64},
             {&GroupMap::listed, bytes_if(keeps.chunks, ranks, sizeof(ListedWord)), 64},
             {&GroupMap::items, bytes_if(keeps.items, ranks * tokens, sizeof(ItemWord)), 64},
             {&GroupMap::lists, bytes_if(keeps.lists, ranks * list_words(c), sizeof(std::uint32_t)),
              64},
             {&GroupMap::scales, capacity * c.scale_room(), 256},
             {&GroupMap::weights, values * sizeof(float), 256},
             {&GroupMap::indices,
              bytes_if(c.layout.choices_beside_rows, values, sizeof(std::int64_t)), 256},
             {&GroupMap::rows, rows, 256}}};
  }
};

}  // namespace xd::ep
