// The parts of a low-latency group's memory on its device that no peer touches.
#pragma once

#include <algorithm>
#include <cstdint>

#include "base/layout.h"
#include "base/math.h"
#include "base/rank_bits.h"
#include "comm/device/comm.h"
#include "ep/slots/config.h"
#include "turn/device/pipeline.h"

namespace xd::ep::cuda {

// Tables of a group in device memory, as byte offsets.
struct LlTables {
  std::uint64_t areas, places, order, counts[2], hosts, end;

  static LlTables make(const LlConfig& c, int blocks) {
    LayoutCursor cursor;
    LlTables tables{};
    tables.areas = cursor.add<HeapRange>(at(c.ranks));
    tables.places = cursor.add<std::uint32_t>(at(c.experts));
    tables.order = cursor.add<std::uint32_t>(at(c.ranks) * at(c.max_tokens));
    for (std::uint64_t& counts : tables.counts)
      counts = cursor.add<turn::PipelineCount>(at(blocks));
    tables.hosts = cursor.add<RankBits>(at(c.ranks));
    tables.end = cursor.at;
    return tables;
  }
};

// The outputs of the dispatch that changes the table of slots, in device memory: byte offsets.
struct LlVerdictMap {
  std::uint64_t plan, counts, row_offsets, end;

  static LlVerdictMap make(const LlConfig& c, std::uint64_t plan_bytes) {
    LayoutCursor cursor;
    LlVerdictMap map{};
    if (c.logical_experts == 0) return map;
    map.plan = cursor.add<std::byte>(plan_bytes, 16);
    map.counts = cursor.add<std::int32_t>(at(c.experts));
    map.row_offsets = cursor.add<std::int64_t>(at(std::max(c.experts, c.ranks)) + 1);
    map.end = cursor.at;
    return map;
  }
};

}  // namespace xd::ep::cuda
