// A communicator as kernels know it: plain data, passed to kernels by value.
//
// Kernels write fatal errors down as hosts do (comm/fatal.h), but in device memory: every rank has
// a board that all its peers have mapped. A kernel that meets a fatal error fills its rank's record
// of its own board and of every peer's, and claims each board by compare-and-swap. Between a kernel
// and its own host there are words in pinned host memory; a device cannot compare-and-swap there,
// so each word has one writer.
//
//   DeviceBoard::first    any rank's kernel    0 = none; s + 1 = record s is complete and the first
//   HostWords::finished   own host             the communicator has a fatal error: kernels leave
//   HostWords::some_lost  own host             look at the words below
//   HostWords::lost       own host             a bit for each rank that takes part in nothing any
//                                              more, unless its end is such a fatal error
//   HostWords::left       own host             of these ranks, those that have said goodbye
//   HostWords::dead       own host             r + 1: rank r is the first of the others; 0 = none
//   HostWords::raised     own kernels          `error` is complete (release)
#pragma once

#include <cstddef>
#include <cstdint>

#include "base/rank_bits.h"
#include "comm/fatal.h"

namespace xd {

inline constexpr int kMaxDeviceRanks = 72;
static_assert(kMaxDeviceRanks <= RankBits::kMostRanks);
inline constexpr std::uint32_t kMaxHeapSegments = 4096;

struct HostWords {
  std::uint32_t finished;
  std::uint32_t some_lost;
  RankBits lost, left;
  std::uint32_t dead;
  std::uint32_t raised;
  FatalError error;
};

struct DeviceBoard {
  std::uint32_t first;
  std::uint32_t claimed;    // own kernels: a kernel is writing this rank's records
  std::uint32_t told_host;  // own kernels: a kernel has taken the error to HostWords
  std::uint32_t some_lost;  // own kernels: HostWords::some_lost, as last seen
  RankBits lost;            // own kernels: HostWords::lost, likewise
  std::uint64_t looked_ns;  // own kernels: when one of them last looked at HostWords
  FatalError record[kMaxDeviceRanks];
};

// The addresses of a segment of a rank's symmetric memory in this process; {nullptr, 0} = the rank
// has no segment of that number.
struct HeapRange {
  std::byte* base;
  std::uint64_t bytes;
};

// Index of a segment and rank in the table of ranges. Entries change while kernels run, when memory
// comes and goes; the table stays where it is, so captured graphs stay right.
constexpr std::size_t heap_entry(std::uint64_t segment, int rank, int num_ranks) {
  return static_cast<std::size_t>(segment * static_cast<std::uint64_t>(num_ranks) +
                                  static_cast<std::uint64_t>(rank));
}

struct DeviceComm {
  int rank;
  int num_ranks;
  int timeout_ms;
  HostWords* host;             // at the address that the device uses
  const HeapRange* heap;       // by heap_entry(), kMaxHeapSegments, in device memory
  DeviceBoard* own_board;      // this rank's, at which every wait looks
  DeviceBoard* const* boards;  // one per rank, in device memory; for other machines' nobody's
};

}  // namespace xd
