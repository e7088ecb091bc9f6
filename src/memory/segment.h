// One piece of anonymous shared memory, created here or received from a peer as a descriptor.
//
// A segment has no name: it is a sealed memfd, so its size cannot change under a reader, and it
// vanishes with the last process that maps it. All its pages are allocated when it is created, so
// exhaustion is an error there and never a SIGBUS later.
//
// Each segment is mapped once per process, whatever number of ranks of this process use it: a
// process-wide counted table, keyed by device and inode, hands out the same mapping. (One address
// per byte and process is also what lets ThreadSanitizer see the protocol between threads.)
#pragma once

#include <cstddef>
#include <memory>

#include "base/fd.h"

namespace xd {

class Segment {
 public:
  struct Created;

  // Allocates, seals and maps `bytes` (> 0, rounded up to pages: see bytes()). Huge pages where the
  // system has them, silently ordinary ones otherwise. Content: zero. `what` starts error texts.
  // Throws OUT_OF_MEMORY with asked and available bytes; SYSTEM.
  static Created create(std::size_t bytes, const char* what);

  // Maps a segment that another rank created. Throws INVALID_ARGUMENT if the descriptor is not a
  // sealed memory file of exactly `bytes`; SYSTEM.
  static std::shared_ptr<Segment> open(UniqueFd fd, std::size_t bytes);

  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  // True if the pages come from the system's pool of huge pages; ordinary memory that the kernel
  // happens to merge into huge pages does not count.
  bool huge_pages() const { return huge_pages_; }
  bool contains(const void* ptr) const {
    const auto* p = static_cast<const std::byte*>(ptr);
    return p >= base_ && p < base_ + bytes_;
  }

 private:
  friend class SegmentTable;
  Segment(const UniqueFd& fd, std::size_t bytes, bool huge_pages);

  std::byte* base_ = nullptr;
  std::size_t bytes_;
  bool huge_pages_;
};

// The descriptor is for handing round; close it when every peer has it.
struct Segment::Created {
  std::shared_ptr<Segment> segment;
  UniqueFd fd;
};

}  // namespace xd
