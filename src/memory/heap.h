// Allocator over the segments of one rank's symmetric heap: best fit, coalescing, all bookkeeping
// outside the shared memory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <vector>

namespace xd {

// A place in one rank's heap: the segment's number in order of creation, and the bytes from the
// segment's start.
struct HeapAddress {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

class Heap {
 public:
  static constexpr std::size_t kAlignment = 256;

  // Takes memory for one more segment's bookkeeping, so that the next add_segment() allocates
  // nothing.
  void make_room();
  // Adds the next segment, which may be empty.
  void add_segment(std::size_t bytes);

  // Throws OUT_OF_MEMORY with asked, largest free and total bytes. bytes = 0 counts as 1. The
  // allocator takes the smallest range that fits, and the lowest of equal ones.
  HeapAddress allocate(std::size_t bytes);

  // False if no live allocation starts there.
  bool release(HeapAddress place);

  // Whether `bytes` bytes there lie in one live allocation, rounding included.
  bool is_allocated(HeapAddress place, std::size_t bytes) const;

  struct Usage {  // bytes, rounding included
    std::size_t total, used, largest_free;
    int segments;
  };
  Usage usage() const;

 private:
  using Ranges = std::map<std::uint64_t, std::uint64_t>;  // offset -> bytes
  struct Zone {                                           // one segment
    std::size_t bytes = 0;
    Ranges free;  // no two of them touch
    Ranges live;
  };

  void make_room_locked();
  Usage usage_locked() const;

  mutable std::mutex mutex_;
  std::vector<Zone> zones_;
  Ranges spare_;  // one entry for the next segment, or none
};

}  // namespace xd
