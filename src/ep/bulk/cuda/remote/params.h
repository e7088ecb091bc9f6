// Facts about ranks on other machines, for kernels: plain data in device memory, which is written
// when the group is made. docs/internals/machines_cuda.md has the protocol.
//
// A remote rank has no memory here. In the table of areas it has a *stand-in* in this rank's own
// memory, so kernels store entries, flags, counts and lists for it as for any other rank. Words of
// them for the remote rank are sent from there; the rest is never read.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/device/comm.h"
#include "ep/bulk/chunk.h"
#include "ep/bulk/cuda/remote/units.h"
#include "ep/bulk/wire.h"
#include "net/commands.h"
#include "net/link_map.h"
#include "turn/entry.h"

namespace xd::ep::cuda {

// Of other machines. Sets of them are 64 bits.
inline constexpr int kMaxRemoteMachines = 64;
inline constexpr int kNear = -1;

// Frames of a rank, by the words of its links: neighbour * frames of it + direction * frames of a
// direction + frame.
inline constexpr int kMostFrames = kMaxDeviceRanks * kDirections * kMostDirectionFrames;

// A unit's place: see units.h. `gone` of RemoteState: how many blocks of hands look at none of its
// words any more; then the last block resets them.
using Units = DealtUnits<32, 16>;
struct alignas(128) HandUnit {
  std::uint64_t number;
  DeskUnit unit;
  std::uint32_t items;
  std::uint32_t moves;  // 0 = this rank moves nothing in the operation
  alignas(64) std::uint32_t done;
};

struct RemoteState {
  // By frame, over the life of the group, modulo 2^32: how often this rank has sent a chunk from
  // it, and has given back one that had landed in it.
  std::uint32_t sent[kMostFrames], read[kMostFrames];

  // Of an operation. Items to each remote machine, in the order of tokens, in front of those that
  // each warp of the block that lists them has found; behind its last warp: all.
  static constexpr int kSegments = 32;
  std::uint32_t items_before[kMaxRemoteMachines][kSegments + 1];
  // By frame: of the chunk that has landed.
  std::uint32_t items_in[kMostFrames], tokens_in[kMostFrames];
  alignas(128) std::uint32_t tickets;
  alignas(128) std::uint64_t over;
  std::uint32_t gone;
  HandUnit units[Units::kPlaces];
};

// A second area of each rank's shared memory, beside GroupMap's.
//   added[stage][src]  src, once per combine  the sums of its rows of remote tokens are in `sums`
//   sums               its rank, in combine   the sum of a remote token's rows here, in the place
//                                             of the first of these rows; read by near relays
struct RemoteMap {
  std::uint64_t added, sums, end;

  // `rows`: those that a rank can receive, or none where no rank pushes sums.
  static constexpr RemoteMap make(int ranks, std::int64_t rows, std::uint64_t row_bytes) {
    LayoutCursor cursor;
    RemoteMap map{};
    map.added = cursor.add<std::uint64_t>(turn::kStages * static_cast<std::uint64_t>(ranks));
    map.sums = cursor.add<std::byte>(static_cast<std::uint64_t>(rows) * row_bytes, 256);
    map.end = cursor.add<std::byte>(0, 256);
    return map;
  }
};

struct RemoteDevice {
  net::LinkMap links;
  int frames;             // of a neighbour and direction
  net::FrameWords words;  // by frame
  std::byte* frames_at;   // pinned, by links
  RemoteState* state;
  std::uint64_t chunk_room;  // bytes of items

  // Neighbours, by their places in RemoteRoutes::neighbours().
  int num_neighbours, num_sources, num_machines, num_near;
  std::int32_t rank_of[kMaxDeviceRanks];     // by neighbour
  std::int32_t sources[kMaxDeviceRanks];     // neighbours
  std::int32_t relays[kMaxRemoteMachines];   // neighbours, by remote machine, ascending
  std::int32_t host_of[kMaxRemoteMachines];  // by remote machine
  std::int32_t machine_of[kMaxDeviceRanks];  // by rank: its remote machine, or kNear
  std::int32_t near[kMaxDeviceRanks];        // ranks
  int machines_before;                       // remote machines whose hosts come before this one
  RemoteMap map;
  std::byte* near_areas[kMaxDeviceRanks];  // by rank, of near ranks: RemoteMap's

  // Memory of this rank's device that nobody else sees.
  std::byte* rows;     // by token: those that go to other machines, as they are sent
  std::byte* scales;   // likewise
  std::byte* answers;  // rows by token and remote machine, most_answers() of a token
  // By token: which of these are here, as bits, below the low half of the operation's epoch.
  std::uint64_t* answers_here;
  std::uint32_t* picks;  // by remote machine and place: the tokens that have rows there

  constexpr int frame(int neighbour, Direction direction, std::uint32_t chunk) const {
    return (neighbour * kDirections + static_cast<int>(direction)) * frames +
           static_cast<int>(chunk % static_cast<std::uint32_t>(frames));
  }
  constexpr int most_answers(int topk) const { return topk < num_machines ? topk : num_machines; }
};

}  // namespace xd::ep::cuda
