// Allocator over the segments of one rank's symmetric heap: best fit, coalescing, all bookkeeping
// outside the shared memory. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <vector>

namespace xd {

// A place in one rank's heap: the segment's number in order of creation, and bytes from its start.
struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

class Heap {
 public:
  static constexpr std::size_t kAlignment = 256;

  // Adds the next segment.
  void add_segment(std::size_t bytes);

  // Throws OUT_OF_MEMORY with asked, largest free and total bytes. bytes = 0 counts as 1.
  Place allocate(std::size_t bytes);

  // False if no live allocation starts there.
  bool release(Place place);

  struct Usage {
    std::size_t total, used, largest_free;
    int segments;
  };
  Usage usage() const;

 private:
  struct Zone {  // one segment: free ranges and allocations, offset -> bytes
    std::size_t bytes = 0;
    std::map<std::uint64_t, std::uint64_t> free;
    std::map<std::uint64_t, std::uint64_t> live;
  };
  mutable std::mutex mutex_;
  std::vector<Zone> zones_;
};

}  // namespace xd
