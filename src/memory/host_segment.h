// Anonymous shared memory of the host, created here or received from a peer as a descriptor.
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
#include "memory/segment.h"

namespace xd {

class HostSegment final : public Segment {
 public:
  struct Created;

  // Allocates, seals and maps `bytes` (> 0, rounded up to pages: see bytes()). The pages are huge
  // where the system has such pages, and silently ordinary ones otherwise. They are zero. `what`
  // starts error texts. Throws OUT_OF_MEMORY with asked and available bytes; SYSTEM.
  static Created create(std::size_t bytes, const char* what);

  // Maps a segment that another rank created. Throws INVALID_ARGUMENT if the descriptor is not a
  // sealed memory file of exactly `bytes`; SYSTEM.
  static std::shared_ptr<HostSegment> open(UniqueFd fd, std::size_t bytes);

  ~HostSegment() override;

  int descriptor() const override { return kept_.get(); }
  // Keeps a descriptor from now on, for descriptor(). Before others use the segment.
  void keep(UniqueFd fd);

 private:
  friend class HostSegmentTable;
  HostSegment(const UniqueFd& fd, std::size_t bytes, bool huge_pages);

  UniqueFd kept_;
};

// A segment, and its descriptor to hand to peers; close that when every peer has it.
struct HostSegment::Created {
  std::shared_ptr<HostSegment> segment;
  UniqueFd fd;
};

class HostSegmentMaker final : public SegmentMaker {
 public:
  // `keeps_descriptors`: its segments have a descriptor() for as long as they live.
  explicit HostSegmentMaker(bool keeps_descriptors = false)
      : keeps_descriptors_(keeps_descriptors) {}

  bool must_compare() const override { return true; }
  OwnDemand demand(std::size_t bytes, const char* what) const override;
  Made create(std::size_t bytes, const char* what) const override;
  std::shared_ptr<Segment> open(int owner, std::span<const std::byte> description,
                                UniqueFd fd) const override;

 private:
  bool keeps_descriptors_;
};

}  // namespace xd
