// The memory in which a process keeps the counters of its sequences, and in which other processes
// of the same user find them.
//
//   the segment: a sealed memory file without a name in any folder. Another process finds it among
//   this process's descriptors (/proc/<pid>/fd), which only the same user and root may follow.
//
//   StatsHeader, then kPlaces places of kPlaceBytes each: Counters, waits by peer
//
// The segment is there as long as the process has a sequence that is counted on it. A
// sequence for which there is no place, descriptor or memory keeps its counters to itself.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <new>

#include "base/math.h"
#include "observe/counters.h"

namespace xd::observe {

inline constexpr const char* kStatsName = "crossdock-stats";

inline constexpr std::size_t kPlaces = 512;

struct StatsHeader {
  static constexpr std::uint64_t kMagic = 0x3164726f61626478;  // "xdboard1"
  std::uint64_t magic;
  std::uint64_t layout;  // tells this layout from others
  // By place; odd = in use. Release: a reader that sees it finds the counters made. They lie here,
  // since a look at a place that was never used would give it memory.
  std::array<std::atomic<std::uint32_t>, kPlaces> generation;
};

struct StatsMap {
  static constexpr std::size_t kPage = 4096;
  static constexpr std::size_t kPlaceBytes = round_up(Counters::bytes(XD_MAX_RANKS), kPage);
  static constexpr std::size_t kBytes = kPage + kPlaces * kPlaceBytes;
  static constexpr std::size_t place(std::size_t i) { return kPage + i * kPlaceBytes; }
  // Other sizes are another layout.
  static constexpr std::uint64_t kLayout = kPlaceBytes << 32 | sizeof(Counters) << 16 | kPlaces;
};
static_assert(sizeof(StatsHeader) <= StatsMap::kPage && sizeof(Counters) < 1 << 16);

// One sequence's counters: on the stats segment if possible, else in memory of this process alone.
class Place {
 public:
  explicit Place(const Identity& identity);
  ~Place();
  Place(const Place&) = delete;
  Place& operator=(const Place&) = delete;

  Counters& counters() const { return *counters_; }

 private:
  struct Free {
    void operator()(std::byte* memory) const {
      ::operator delete[](memory, std::align_val_t{alignof(Counters)});
    }
  };
  Counters* counters_;
  int index_;                                  // on the stats segment
  std::unique_ptr<std::byte[], Free> memory_;  // where it is not there
};

// The stats segment of a process, as another one reads it.
class StatsReader {
 public:
  // Throws INVALID_ARGUMENT where there is none, UNSUPPORTED where it is another layout.
  explicit StatsReader(int pid);
  ~StatsReader();
  StatsReader(const StatsReader&) = delete;
  StatsReader& operator=(const StatsReader&) = delete;

  // Copies a place that is in use; false where it is free. `waits` gets as many as there are, up to
  // max_ranks.
  bool read(std::size_t place, xd_stats_source& source, xd_stats& stats, std::int64_t* waits,
            int max_ranks) const;

 private:
  const std::byte* base_ = nullptr;
};

}  // namespace xd::observe
