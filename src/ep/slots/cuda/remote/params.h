// Facts about ranks on other machines, for the kernels of low latency: plain data. See
// docs/internals/low_latency_machines.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ep/slots/cuda/params.h"
#include "ep/slots/cuda/remote/frames.h"
#include "net/commands.h"
#include "net/link_map.h"

namespace xd::ep::cuda {

inline constexpr int kLlCarrierThreads = 256, kLlMostCarriers = 16;

// Of a rank, by the words of its links: neighbour * frames of it + frame.
inline constexpr int kLlMostFrames = kMaxDeviceRanks * kLlRemoteKinds * XD_LL_MAX_IN_FLIGHT;

// Parts of a launch of the carrier whose last block tells the proxy what all have done.
enum LlCarried : int { kLlPosted, kLlLanded, kLlCarriedParts };

// Working state, in memory of this rank's device. Launches of a pipeline follow one another, so
// each word has one writer at a time.
struct LlRemoteState {
  // By frame: the last use that this rank has sent, and the last one that it has read or given up.
  std::uint32_t sent[kLlMostFrames], read[kLlMostFrames];
  // By neighbour: messages of weights, sent and read or given up.
  std::uint64_t weights_sent[kMaxDeviceRanks], weights_read[kMaxDeviceRanks];
  // By pipeline: the operation that the last whole call sends, or 0 where it was refused.
  std::uint64_t whole[2];
  // By pipeline. Of a launch, and zero again behind it: blocks that have done a part; items of the
  // message to each neighbour.
  std::uint32_t blocks[2][kLlCarriedParts];
  std::uint32_t items[2][kMaxDeviceRanks];
};

struct LlRemoteDevice {
  net::LinkMap links;
  net::FrameWords words;  // by frame
  std::byte* frames_at;   // pinned, by `links`
  LlRemoteState* state;
  LlFrames frames;
  int num_neighbours;                          // all ranks on other machines
  std::int32_t rank_of[kMaxDeviceRanks];       // by neighbour, ascending
  std::int32_t neighbour_of[kMaxDeviceRanks];  // by rank; -1 = near
  // Sums for a remote rank are stored as if to its memory, of which this is what it has here: the
  // areas of the table that combine has, by neighbour.
  std::byte* stand_ins;
  std::uint64_t stand_in_bytes;

  constexpr std::uint32_t frame(int neighbour, LlRemoteKind kind, std::uint64_t number) const {
    return static_cast<std::uint32_t>(neighbour) * frames.of_neighbour() +
           frames.frame(kind, number);
  }
  constexpr std::byte* stand_in(int neighbour) const {
    return stand_ins + static_cast<std::uint64_t>(neighbour) * stand_in_bytes;
  }
};

// The bytes of a message in front of its items. Items have the place of a row or sum in the
// receiver's memory, then as many bytes as the header says.
struct LlMessageMap {
  std::uint64_t bad_ids, ids, items;

  static constexpr LlMessageMap make(LlRemoteKind kind, const LlIdWords& form, int max_tokens) {
    LlMessageMap map{.bad_ids = sizeof(LlRemoteHeader), .ids = 0, .items = sizeof(LlRemoteHeader)};
    if (kind != LlRemoteKind::dispatch) return map;
    map.ids = map.bad_ids + net::kItemAlignment;
    map.items = map.ids + static_cast<std::uint64_t>(max_tokens) *
                              static_cast<std::uint64_t>(form.words) * sizeof(std::uint64_t);
    return map;
  }
};
inline constexpr std::uint64_t kLlItemHead = net::kItemAlignment;

// How a launch of the near kernels stands to a call that is made of several.
enum class LlGuard : std::int32_t {
  none,    // it is a half, or a call that has failed
  opens,   // the send half of a whole call: refused where operations are between their halves
  follows  // its receive half: does nothing where the send half has been refused, or has failed
};

struct LlGuarded {
  LlGuard guard;
  LlRemoteState* state;
};

struct LlRemoteDispatchParams {
  LlGivenParams call;
  LlGuarded guarded;
};

struct LlRemoteCombineParams {
  LlCombineParams call;
  // The call as it fails: where `out` of a whole call has other rows than its plan, its send half
  // fails, too.
  LlCombineParams unfit;
  bool checks_out;
  LlGuarded guarded;
};

// The parts of a launch of the carrier, in this order.
struct LlCarry {
  int kind;       // a pipeline
  bool weights;   // in front of the send half of a combine: sends weights, and waits for all
  bool whole;     // the call does both halves
  bool posts;     // sends the messages of the operation that has been sent
  bool lands;     // brings in those of the next one that is received
  bool gives_up;  // in the place of that: does without them
  std::uint32_t item_bytes;   // of a row or sum that is sent, a multiple of 16
  const std::byte* plan;      // of a combine with weights
  const float* topk_weights;  // [tokens,topk]
  std::uint32_t tokens, topk;
  std::int64_t* wait_ns;
};

struct LlCarryParams {
  LlDevice group;
  const LlRemoteDevice* remote;
  LlCarry step;
};

}  // namespace xd::ep::cuda
