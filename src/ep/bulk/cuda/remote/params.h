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
#include "ep/bulk/wire.h"
#include "net/commands.h"
#include "net/link_map.h"
#include "turn/entry.h"

namespace xd::ep::cuda {

// Frames of a neighbour and direction: two to a relay, two back to a source. Chunks of a direction
// take its frames in turn, so they are read in the order in which they were filled.
inline constexpr int kDirectionFrames = 2, kRemoteFrames = kDirections * kDirectionFrames;

// Of other machines. Sets of them are 64 bits.
inline constexpr int kMaxRemoteMachines = 64;
inline constexpr int kNear = -1;

// How many chunks have gone through each direction: of this rank's, filled; of the neighbour's,
// read. A group may live for more than 2^32 of them; the uses of a frame are counted modulo 2^32.
struct RemoteState {
  std::uint64_t filled[kMaxDeviceRanks][kDirections];
  std::uint64_t read[kMaxDeviceRanks][kDirections];
};
// The frame of a direction's chunk n, and how often it has been used before.
constexpr int direction_frame_of(std::uint64_t n) { return static_cast<int>(n % kDirectionFrames); }
constexpr std::uint32_t uses_before(std::uint64_t n) {
  return static_cast<std::uint32_t>(n / kDirectionFrames);
}

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
  // By frame: neighbour * kRemoteFrames + direction * kDirectionFrames + frame of the direction.
  net::FrameWords words;
  std::byte* frames;  // pinned, by links
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

  constexpr int most_answers(int topk) const { return topk < num_machines ? topk : num_machines; }
};

}  // namespace xd::ep::cuda
