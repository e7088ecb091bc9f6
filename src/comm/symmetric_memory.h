// How segments of symmetric memory come and go: collective growth of the heaps, and registration of
// memory that callers own.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "comm/collective.h"
#include "comm/device/side.h"
#include "comm/errors.h"
#include "comm/symmetric_heap.h"
#include "memory/segment.h"

namespace xd {

class SymmetricMemory {
 public:
  // `device_side` is that of this rank's device, or nullptr on the CPU. All of it must outlive the
  // object.
  SymmetricMemory(int rank, Collective& collective, Errors& errors, const SegmentMaker& memory,
                  DeviceSide* device_side)
      : rank_(rank),
        collective_(collective),
        errors_(errors),
        memory_(memory),
        device_side_(device_side),
        heap_(rank) {}

  SymmetricHeap& heap() { return heap_; }
  const SymmetricHeap& heap() const { return heap_; }

  // Adds the next segment to the heaps, as a step of `call`. Nothing is added where no rank asks
  // for memory.
  void add(CollectiveCall call, std::size_t bytes);

  // Adds a segment that the ranks had before this one took its place. Local.
  void adopt(Segments segments) {
    heap_.make_room();
    heap_.add(std::move(segments));
  }

  // ---- Collective calls as a whole ----

  void grow(std::size_t bytes) {
    collective_.run(Collective::kGrow, [&] { add(Collective::kGrow, bytes); });
  }
  // Makes memory that the caller owns one more segment; bytes = 0: this rank gives none.
  // *registration gets the segment's number, the same on all ranks. Collective; throws
  // INVALID_ARGUMENT, which all ranks learn of, where `registration` is nullptr.
  void enlist(void* ptr, std::size_t bytes, std::int32_t* registration);
  void delist(int registration);

 private:
  std::uint32_t agree_on_number(CollectiveCall call);
  int add_registered(void* ptr, std::size_t bytes);
  void remove_registered(int registration);
  void fail_delisting();
  void require_device_memory() const;

  const int rank_;
  Collective& collective_;
  Errors& errors_;
  const SegmentMaker& memory_;
  DeviceSide* const device_side_;
  SymmetricHeap heap_;
};

}  // namespace xd
