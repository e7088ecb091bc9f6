// The symmetric heaps of all ranks, as this rank sees them: it allocates from its own, and reads
// and writes its peers' by place. Thread-safe.
//
// Segments have equal numbers on all ranks, whether the heap has grown by them or callers have
// registered them. A captured graph may go on using the number of a registration that has ended, so
// such numbers are used again only when all others have been used.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <shared_mutex>
#include <vector>

#include "comm/device/comm.h"
#include "memory/heap.h"
#include "memory/segment.h"

namespace xd {

class SymmetricHeap {
 public:
  explicit SymmetricHeap(int rank) : rank_(rank) {}

  using OfRank = std::vector<std::shared_ptr<Segment>>;  // null for a rank whose share is empty

  // The number of the segment that is added next.
  std::uint32_t next_number() const;
  // Throws OUT_OF_MEMORY if kernels could not be told of one more segment: see kMaxHeapSegments.
  void require_room() const;
  // Takes memory for one more segment's bookkeeping, so that the next add() or add_registered()
  // allocates nothing.
  void make_room();

  // Adds every rank's next segment of its heap; its number is next_number().
  void add(OfRank segment_of_rank);
  // Adds memory that the callers own, with number next_number(). Tensors in it are found by address
  // and by place, and nothing is allocated from it.
  void add_registered(OfRank segment_of_rank);
  bool is_registered(std::uint32_t number) const;
  // Forgets a registration. Its segments stay mapped for as long as the caller keeps the returned
  // value.
  [[nodiscard]] OfRank remove_registered(std::uint32_t number);

  void* allocate(std::size_t bytes);  // throws OUT_OF_MEMORY
  bool release(void* ptr);            // false: no live allocation of this rank starts there

  // The place of [ptr, ptr + bytes) in this rank's heap, if it lies there.
  std::optional<HeapAddress> find(const void* ptr, std::size_t bytes) const;

  // Likewise, if it lies in one allocation that has not been released.
  std::optional<HeapAddress> find_allocated(const void* ptr, std::size_t bytes) const;

  // Address of `bytes` bytes at a rank's place, or nullptr if they are not all there.
  std::byte* address(int rank, HeapAddress place, std::size_t bytes) const;
  // A rank's segment; {nullptr, 0} if it has none of that number.
  HeapRange range(int rank, std::uint32_t segment) const;

  // The segments of all ranks, by number.
  std::vector<OfRank> all() const;

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

  struct Entry {
    OfRank of_rank;       // empty = the number is free
    std::int64_t zone{};  // zone of heap_; kRegistered = memory that the callers own
  };
  static constexpr std::int64_t kRegistered = -1;

  void insert(OfRank&& of_rank, std::int64_t zone);
  std::optional<HeapAddress> zone_place(HeapAddress place) const;
  const Segment* segment(std::uint32_t number, int rank) const;
  void insert_range(const Segment* own, std::uint32_t number);
  void erase_range(std::uint32_t number);
  void update_furthest();
  std::uint32_t next_number_locked() const;

  int rank_;
  Heap heap_;  // this rank's
  mutable std::shared_mutex mutex_;
  std::vector<Entry> entries_;  // by number
  std::size_t in_use_ = 0;      // entries that are not free
  std::size_t cursor_ = 0;      // the number behind the last one given
  std::vector<std::uint32_t> number_of_zone_;
  std::vector<Range> ranges_;  // ascending
};

}  // namespace xd
