#include "memory/heap.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "base/error.h"
#include "base/math.h"

namespace xd {

void Heap::make_room() {
  const std::scoped_lock lock(mutex_);
  make_room_locked();
}

void Heap::make_room_locked() {
  zones_.reserve(zones_.size() + 1);
  if (spare_.empty()) spare_.emplace(0, 0);
}

void Heap::add_segment(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  make_room_locked();
  Zone zone;
  zone.bytes = bytes;
  const std::uint64_t usable = bytes / kAlignment * kAlignment;
  if (usable > 0) {
    zone.free.swap(spare_);
    zone.free.begin()->second = usable;
  }
  zones_.push_back(std::move(zone));
}

HeapAddress Heap::allocate(std::size_t bytes) {
  const std::scoped_lock lock(mutex_);
  // Rounding may wrap to a small number; the second condition below catches that.
  const std::uint64_t size = round_up(std::max<std::uint64_t>(bytes, 1), kAlignment);

  Zone* best_zone = nullptr;
  Ranges::iterator best;
  for (Zone& zone : zones_) {
    for (auto range = zone.free.begin(); range != zone.free.end(); ++range) {
      if (range->second < size || size < bytes) continue;
      if (best_zone == nullptr || range->second < best->second) {
        best_zone = &zone;
        best = range;
      }
    }
  }
  if (best_zone == nullptr) {
    const Usage now = usage_locked();
    fail(XD_ERROR_OUT_OF_MEMORY, "symmetric heap exhausted: asked ", bytes,
         " bytes, largest free range ", now.largest_free, " bytes, total ", now.total, " bytes in ",
         now.segments, " segments");
  }

  const std::uint64_t offset = best->first;
  best_zone->live.emplace(offset, size);  // The only step that may throw comes first.
  auto range = best_zone->free.extract(best);
  if (range.mapped() > size) {
    range.key() += size;
    range.mapped() -= size;
    best_zone->free.insert(std::move(range));
  }
  return {static_cast<std::uint32_t>(best_zone - zones_.data()), offset};
}

bool Heap::release(HeapAddress place) {
  const std::scoped_lock lock(mutex_);
  if (place.segment >= zones_.size()) return false;
  Zone& zone = zones_[place.segment];
  auto range = zone.live.extract(place.offset);
  if (range.empty()) return false;

  // The node moves from one map to the other, so that freeing cannot run out of memory.
  const auto here = zone.free.insert(std::move(range)).position;
  const auto next = std::next(here);
  if (next != zone.free.end() && here->first + here->second == next->first) {
    here->second += next->second;
    zone.free.erase(next);
  }
  if (here != zone.free.begin()) {
    const auto before = std::prev(here);
    if (before->first + before->second == here->first) {
      before->second += here->second;
      zone.free.erase(here);
    }
  }
  return true;
}

bool Heap::is_allocated(HeapAddress place, std::size_t bytes) const {
  const std::scoped_lock lock(mutex_);
  if (place.segment >= zones_.size()) return false;
  const Ranges& live = zones_[place.segment].live;
  const auto behind = live.upper_bound(place.offset);
  if (behind == live.begin()) return false;
  const auto& [offset, size] = *std::prev(behind);
  const std::uint64_t begin = place.offset - offset;
  return begin < size && bytes <= size - begin;
}

Heap::Usage Heap::usage() const {
  const std::scoped_lock lock(mutex_);
  return usage_locked();
}

Heap::Usage Heap::usage_locked() const {
  Usage sum{.total = 0, .used = 0, .largest_free = 0, .segments = static_cast<int>(zones_.size())};
  for (const Zone& zone : zones_) {
    sum.total += zone.bytes;
    for (const auto& [offset, bytes] : zone.live) sum.used += bytes;
    for (const auto& [offset, bytes] : zone.free) {
      sum.largest_free = std::max<std::size_t>(sum.largest_free, bytes);
    }
  }
  return sum;
}

}  // namespace xd
