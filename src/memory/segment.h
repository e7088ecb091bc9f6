// One piece of memory that ranks share, on the host or on a device. Executors see only its address;
// SegmentMaker knows how it is made and handed to peers.
#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <vector>

#include "base/fd.h"
#include "memory/demand.h"

namespace xd {

class Segment {
 public:
  virtual ~Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  std::byte* base() const { return base_; }
  std::size_t bytes() const { return bytes_; }
  // True if the pages come from the system's pool of huge pages; ordinary memory that the kernel
  // happens to merge into huge pages does not count.
  bool huge_pages() const { return huge_pages_; }
  // A descriptor by which other processes can map it, where it keeps one (see HostSegmentMaker);
  // else -1.
  virtual int descriptor() const { return -1; }
  bool contains(const void* ptr) const {
    const auto* p = static_cast<const std::byte*>(ptr);
    return p >= base_ && p < base_ + bytes_;
  }

 protected:
  Segment(std::byte* base, std::size_t bytes, bool huge_pages)
      : base_(base), bytes_(bytes), huge_pages_(huge_pages) {}

 private:
  std::byte* base_;
  std::size_t bytes_;
  bool huge_pages_;
};

// Makes segments of one kind, and maps those of peers. A peer gets a descriptor and a few bytes of
// description, in whatever way the caller has.
class SegmentMaker {
 public:
  struct Made {
    std::shared_ptr<Segment> segment;
    std::vector<std::byte> description;
    UniqueFd fd;  // close it when every peer has it
  };

  virtual ~SegmentMaker() = default;

  // True where a rank that takes more memory than there is gets killed, instead of an error. Then
  // ranks compare what they are going to create (require_together()) before any of them creates it.
  virtual bool must_compare() const { return false; }
  // bytes = 0: nothing. Throws OUT_OF_MEMORY if this rank alone asks for too much.
  virtual OwnDemand demand(std::size_t, const char*) const { return {}; }

  // `bytes` > 0, rounded up to pages. Content: zero. `what` starts error texts. Throws
  // OUT_OF_MEMORY with asked and available bytes; SYSTEM.
  virtual Made create(std::size_t bytes, const char* what) const = 0;

  // Maps a segment that rank `owner` has made. Throws MISMATCH if the description makes no sense.
  virtual std::shared_ptr<Segment> open(int owner, std::span<const std::byte> description,
                                        UniqueFd fd) const = 0;
};

}  // namespace xd
