// The plain data that kernels of any family get to take turns. A family derives from these structs
// and adds its own data.
#pragma once

#include <cstddef>
#include <cstdint>

#include "comm/device/comm.h"
#include "turn/entry.h"

namespace xd::turn {

// A launch's mark in DeviceControl::owner: never 0, and more than the number of blocks that may
// still write when an operation has ended. Launches that overlap have different marks: they come
// round after 33 million launches of the sequence.
inline constexpr std::uint32_t kLeastMark = 128;
constexpr std::uint32_t mark_of(std::uint32_t launch) {
  constexpr std::uint32_t kMarks = UINT32_MAX / kLeastMark;  // the mark behind them would be 0
  return (launch % kMarks + 1) * kLeastMark;
}

// Working state of a sequence, in memory of the rank's device that no peer touches. One launch at a
// time uses it; the last thread block of a launch leaves it ready for the next.
struct DeviceControl {
  std::uint64_t epoch;  // number of the last operation that has ended
  // Low half: mark of the launch that is running, or the number of blocks that still write though
  // their operation has ended (DeviceTurn::end_ahead); 0 = none. High half: the epoch's low half.
  // So one atomic operation claims the sequence and tells which epoch it was claimed at.
  std::uint64_t owner;
  std::uint64_t errors;   // DeviceReport::errors
  std::uint32_t barrier;  // arrivals at the grid barriers of this launch
  std::uint32_t left;     // thread blocks that touch no peer's memory any more
  std::uint32_t ended;    // thread blocks that look at nothing here any more
  std::uint32_t reserved;
};

// The report of operations to their host, in pinned memory. The first operation error stays until
// the host has taken it (taken == written). `Findings` are a family's facts about an operation
// error.
template <class Record, class Findings>
struct DeviceReport {
  std::uint32_t written;  // device: operation errors written here so far (release)
  std::uint32_t taken;    // host: operation errors read
  std::int32_t status;
  std::int32_t operation;
  std::uint64_t epoch;
  std::int32_t rank;  // the rank that the operation error is about
  // In a sequence whose operation errors are fatal: the launch whose operation error has finished
  // the communicator, written before that error is raised; 0 = none. (An operation error that the
  // host's checks find has no report.)
  std::uint32_t fatal_launch;
  Findings findings;
  Record record[kMaxDeviceRanks];  // MISMATCH: the records of all ranks
  // Number of operations that have ended with an operation error (release: after their report
  // above). It has a cache line of its own, since hosts may look at it all the time.
  alignas(64) std::uint64_t errors;
};

// The data that stays the same over a sequence's life. `Map` is the layout of what a rank shares;
// it has a TurnMap `turn`.
template <class Control, class Report, class Map>
struct DeviceGroup {
  DeviceComm comm;
  int number;
  bool fatal_errors;  // an operation error finishes the communicator
  Control* control;
  Report* report;
  // Memory that each rank shares for this sequence: a table by rank, in device memory. Blocks bring
  // it to their shared memory when they begin (DeviceTurn::area).
  const HeapRange* areas;
  Map map;  // offsets in this rank's area, and in every area as far as peers write there

  constexpr int rank() const { return comm.rank; }
  constexpr int ranks() const { return comm.num_ranks; }
};

// One operation's turn.
template <class Group, class Record>
struct DeviceTurnParams {
  Group group;
  std::uint32_t launch;  // number of this launch in the sequence, not 0
  Record record;         // the record, as far as the host knows it
};

}  // namespace xd::turn
