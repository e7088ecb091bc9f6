// The plain data of a pipeline on the device: see turn/device/pipeline.cuh.
#pragma once

#include <cstdint>

#include "base/layout.h"
#include "base/rank_bits.h"
#include "turn/entry.h"

namespace xd::turn {

// A rank's word about itself, as of the launches before the one that says it, and of the stages
// that this one has freed. Each word is there for itself.
struct alignas(16) PipelineCredit {
  std::uint64_t freed;  // the stages of this many operations are free again here
  std::uint64_t sent;   // of this many operations nothing more is stored at anybody's
};

// A pipeline's part of the memory that a rank shares, as byte offsets.
//
//   area of rank r     written by             means
//   entry[stage][src]  src, once per op       the record of src's send half, sealed with its number
//   credit[src]        src, now and then      PipelineCredit
struct PipelineMap {
  std::uint64_t entry, credit;

  template <class Record>
  static constexpr PipelineMap add(LayoutCursor& cursor, int ranks, int stages) {
    const auto all = static_cast<std::uint64_t>(ranks);
    PipelineMap map{};
    map.entry = cursor.add<Entry<Record>>(static_cast<std::uint64_t>(stages) * all, 64);
    map.credit = cursor.add<PipelineCredit>(all, 64);
    return map;
  }
};

// How many operations of a pipeline this rank has sent and taken, as one thread block counts. Each
// block has its own, on a line of its own, and every launch writes all of them: so whatever the
// number of its blocks, each finds its count without asking another block.
struct alignas(256) PipelineCount {
  std::uint64_t sent, taken;
};

// The numbers of a launch's operations.
struct PipelineEpochs {
  std::uint64_t sent, taken;  // before this launch
};

}  // namespace xd::turn
