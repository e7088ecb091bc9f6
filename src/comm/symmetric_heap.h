// The symmetric heaps of all ranks, as this rank sees them: its own, which it allocates from, and
// its peers', which it reads and writes by place. Thread-safe.
#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "memory/heap.h"
#include "memory/segment.h"

namespace xd {

class SymmetricHeap {
 public:
  explicit SymmetricHeap(int rank) : rank_(rank) {}

  // Adds every rank's next segment; null for a rank whose share is empty.
  void add(std::vector<std::shared_ptr<Segment>> segment_of_rank);

  void* allocate(std::size_t bytes);  // throws OUT_OF_MEMORY
  bool release(void* ptr);            // false: no live allocation of this rank starts there

  // Where [ptr, ptr + bytes) lies in this rank's heap, if it does.
  std::optional<Place> find(const void* ptr, std::size_t bytes) const;

  // Address of `bytes` bytes at a rank's place, or nullptr if they are not all there.
  std::byte* address(int rank, Place place, std::size_t bytes) const;

  Heap::Usage usage() const { return heap_.usage(); }
  bool huge_pages() const;

 private:
  int rank_;
  Heap heap_;  // this rank's
  mutable std::shared_mutex mutex_;
  std::vector<std::vector<std::shared_ptr<Segment>>> segments_;  // [segment][rank]; only grows
};

}  // namespace xd
