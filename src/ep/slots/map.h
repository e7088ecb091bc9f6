// The memory that the ranks of a group of low latency share.
//
//   area of rank r             written by         means
//   pipeline[kind]             src                entry records and credits of dispatch and of
//                                                 combine: see turn/entry.h
//   masked_by[src]             src                other than 0: src leaves out r
//   reset[src]                 src, in reset      see turn/host/reset.h
//   landed[stage][src]         src, in combine    the operation whose partial sums are all here
//   listed[stage][src]         src, in dispatch   how many items[] follow
//   items[stage][src][i]       src, in dispatch   LlItem (plan.h) of a token with rows here,
//                                                 with local experts in place of rows
//   rows[stage][t]             r, in dispatch     the row of r's token t, which its peers read;
//                                                 behind it its scales if it is quantised
//   weights[stage][src][t]     src, in combine    K weights of token t, where the call has weights
//   partials[stage][t][place]  ranks, in combine  partial sum of r's token t, in the form of the
//                                                 call's wire: partial_of()
//
// stage = number of the operation mod in_flight. A stage is written again only under the credits of
// all that take part: they have taken the operation that was there. All that lies in a stage is
// covered by the entry's epoch in dispatch and by landed[] in combine (weights[] by the entry's
// epoch): written before it, and read behind it.
#pragma once

#include <array>
#include <cstdint>

#include "base/layout.h"
#include "ep/plan/plan.h"
#include "ep/slots/config.h"
#include "ep/slots/placement.h"
#include "ep/slots/record.h"
#include "turn/entry.h"
#include "turn/host/reset.h"

namespace xd::ep {

enum class LlKind { dispatch, combine };

struct LlMap {
  std::array<turn::TurnMap, 2> pipeline;  // by LlKind
  std::uint64_t masked_by, reset, landed, listed, items, rows, weights, partials, end;

  static LlMap make(const LlConfig& c) {
    const auto ranks = static_cast<std::uint64_t>(c.ranks);
    const auto stages = static_cast<std::uint64_t>(c.in_flight);
    const auto tokens = static_cast<std::uint64_t>(c.max_tokens);
    const auto topk = static_cast<std::uint64_t>(c.max_topk);
    const std::uint64_t cells = stages * ranks;
    LayoutCursor cursor;
    LlMap map{};
    for (turn::TurnMap& pipeline : map.pipeline) {
      pipeline = turn::TurnMap::add<LlRecord>(cursor, c.ranks, stages);
    }
    map.masked_by = cursor.add<std::uint64_t>(ranks, 64);
    map.reset = cursor.add<turn::ResetCell>(ranks);
    map.landed = cursor.add<turn::DoneFlag>(cells);
    map.listed = cursor.add<std::uint64_t>(cells, 64);
    map.items = cursor.add<std::byte>(cells * tokens * ll_item_bytes(c.max_topk), 64);
    map.weights = cursor.add<float>(cells * tokens * topk, 64);
    map.rows = cursor.add<std::byte>(stages * tokens * c.max_row_bytes, 256);
    map.partials = cursor.add<std::byte>(
        stages * tokens * static_cast<std::uint64_t>(partial_places(c)) * c.max_wire_bytes(), 256);
    map.end = cursor.add<std::byte>(0, 256);
    return map;
  }
};

}  // namespace xd::ep
