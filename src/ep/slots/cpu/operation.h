// The common parts of dispatch and combine of low latency on the CPU. LlGroup calls their halves
// between the verbs of their pipeline.
#pragma once

#include <cstdint>
#include <utility>

#include "ep/plan/cpu/rows.h"
#include "ep/slots/cpu/memory.h"
#include "ep/slots/record.h"
#include "observe/subject.h"
#include "turn/disagreement.h"
#include "turn/host/pipeline.h"

namespace xd::ep::cpu {

using Pipeline = turn::HostPipeline<LlRecord>;

// The way in which rows are stored that a peer reads next. A cached store would first take each
// line from the caches of the peer, which has read what was there before: line after line, for
// several times as long as the copy itself takes. rows::flush() comes before the flag.
constexpr rows::Store kForPeers = rows::Store::streaming;

class LlRemotePipeline;

struct LlContext {
  LlGroup& group;
  LlMemory& memory;
  turn::PeerMasks& masks;
  LlScratch& scratch;
  Pipeline& pipeline;
  LlRemotePipeline* remote;  // nullptr: all ranks are near

  const LlConfig& config() const { return group.config(); }
  NearRank self() const { return group.self(); }
};

// Measures how long a receive half waits for each source: for the group, and for a caller who wants
// to know.
inline observe::WaitTimes wait_times(const LlContext& context, const Tensor& of_caller) {
  return observe::WaitTimes(context.group.subject(),
                            of_caller ? of_caller.as<std::int64_t>() : nullptr);
}

// The verdict about an operation whose records have come: all ranks see the same records, and judge
// alike.
inline LlOperationError verdict(const Pipeline& pipeline, int rank) {
  return turn::disagreement<LlFamily, LlRecord>(pipeline.records(), rank,
                                                [&](int r) { return pipeline.here().has(r); });
}

}  // namespace xd::ep::cpu
