// The symmetric heaps of all ranks, as this rank sees them: its own, which it allocates from, and
// its peers', which it reads and writes by place. Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
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

  // Memory for one more segment's bookkeeping: the next add() allocates nothing.
  void make_room();
  // Adds every rank's next segment; null for a rank whose share is empty.
  void add(std::vector<std::shared_ptr<Segment>> segment_of_rank);
  std::uint32_t next_segment() const;  // the number that add() will give

  // Memory that the callers own, by rank like the heap's own segments: found by address and by
  // place, and nothing is allocated from it. Numbered downwards from the last. Adding allocates
  // nothing.
  using Registered = std::map<std::uint32_t, std::vector<std::shared_ptr<Segment>>>;
  void add_registered(Registered&& more) noexcept;
  std::optional<std::uint32_t> next_registered() const;  // nothing: there is no room for one
  bool is_registered(std::uint32_t segment) const;
  void remove_registered(std::uint32_t segment);

  // Throws OUT_OF_MEMORY if kernels could not be told of one more segment: see HeapTable.
  void require_room() const;

  void* allocate(std::size_t bytes);  // throws OUT_OF_MEMORY
  bool release(void* ptr);            // false: no live allocation of this rank starts there

  // Where [ptr, ptr + bytes) lies in this rank's heap, if it does.
  std::optional<Place> find(const void* ptr, std::size_t bytes) const;

  // Address of `bytes` bytes at a rank's place, or nullptr if they are not all there.
  std::byte* address(int rank, Place place, std::size_t bytes) const;

  Heap::Usage usage() const { return heap_.usage(); }
  bool huge_pages() const;

 private:
  // This rank's segments by address.
  struct Range {
    const std::byte* begin;
    const std::byte* end;
    const std::byte* furthest;  // end of this or any earlier one: registrations may overlap
    std::uint32_t number;
  };

  const Segment* segment(std::uint32_t number, int rank) const;
  void insert_range(const Segment* own, std::uint32_t number);
  void erase_range(std::uint32_t number);
  void update_furthest();
  std::size_t count() const { return segments_.size() + registered_.size(); }

  int rank_;
  Heap heap_;  // this rank's
  mutable std::shared_mutex mutex_;
  std::vector<std::vector<std::shared_ptr<Segment>>> segments_;  // [segment][rank]; only grows
  Registered registered_;
  std::vector<Range> ranges_;  // ascending
};

}  // namespace xd
