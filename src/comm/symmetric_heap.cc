#include "comm/symmetric_heap.h"

#include <algorithm>
#include <mutex>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "comm/device/comm.h"

namespace xd {

void SymmetricHeap::make_room() {
  const std::unique_lock lock(mutex_);
  entries_.reserve(entries_.size() + 1);
  number_of_zone_.reserve(number_of_zone_.size() + 1);
  ranges_.reserve(ranges_.size() + 1);
  heap_.make_room();
}

void SymmetricHeap::add(OfRank segment_of_rank) {
  const Segment* own = segment_of_rank[at(rank_)].get();
  const std::size_t bytes = own != nullptr ? own->bytes() : 0;
  const std::unique_lock lock(mutex_);
  number_of_zone_.push_back(next_number_locked());
  insert(std::move(segment_of_rank), static_cast<std::int64_t>(number_of_zone_.size()) - 1);
  heap_.add_segment(bytes);
}

void SymmetricHeap::add_registered(OfRank segment_of_rank) {
  const std::unique_lock lock(mutex_);
  insert(std::move(segment_of_rank), kRegistered);
}

void SymmetricHeap::insert(OfRank&& of_rank, std::int64_t zone) {
  const std::uint32_t number = next_number_locked();
  insert_range(of_rank[at(rank_)].get(), number);
  if (number == entries_.size()) entries_.emplace_back();
  entries_[number] = {std::move(of_rank), zone};
  ++in_use_;
  cursor_ = number + 1;
}

std::uint32_t SymmetricHeap::next_number() const {
  const std::shared_lock lock(mutex_);
  return next_number_locked();
}

std::uint32_t SymmetricHeap::next_number_locked() const {
  const std::size_t count = entries_.size();
  std::size_t number = count;
  if (count >= kMaxHeapSegments && in_use_ < count) {
    number = cursor_ % count;
    while (!entries_[number].of_rank.empty()) number = (number + 1) % count;
  }
  return static_cast<std::uint32_t>(number);
}

bool SymmetricHeap::is_registered(std::uint32_t number) const {
  const std::shared_lock lock(mutex_);
  return number < entries_.size() && !entries_[number].of_rank.empty() &&
         entries_[number].zone == kRegistered;
}

SymmetricHeap::OfRank SymmetricHeap::remove_registered(std::uint32_t number) {
  const std::unique_lock lock(mutex_);
  erase_range(number);
  --in_use_;
  return std::exchange(entries_[number].of_rank, {});
}

void SymmetricHeap::require_room() const {
  const std::shared_lock lock(mutex_);
  if (in_use_ < kMaxHeapSegments) return;
  fail(XD_ERROR_OUT_OF_MEMORY, "symmetric memory has ", in_use_,
       " segments, growths and registrations together, expected at most ", kMaxHeapSegments);
}

void* SymmetricHeap::allocate(std::size_t bytes) {
  const HeapAddress in_heap = heap_.allocate(bytes);
  const std::shared_lock lock(mutex_);
  const OfRank& of_rank = entries_[number_of_zone_[in_heap.segment]].of_rank;
  return of_rank[at(rank_)]->base() + in_heap.offset;
}

bool SymmetricHeap::release(void* ptr) {
  const auto place = find(ptr, 1);
  const auto in_heap = place ? zone_place(*place) : std::nullopt;
  return in_heap && heap_.release(*in_heap);
}

std::optional<HeapAddress> SymmetricHeap::find_allocated(const void* ptr, std::size_t bytes) const {
  const auto place = find(ptr, bytes);
  const auto in_heap = place ? zone_place(*place) : std::nullopt;
  return in_heap && heap_.is_allocated(*in_heap, bytes) ? place : std::nullopt;
}

// The place as heap_ counts its zones; nothing for memory that the callers own.
std::optional<HeapAddress> SymmetricHeap::zone_place(HeapAddress place) const {
  const std::shared_lock lock(mutex_);
  const std::int64_t zone = entries_[place.segment].zone;
  if (zone == kRegistered) return std::nullopt;
  return HeapAddress{static_cast<std::uint32_t>(zone), place.offset};
}

std::optional<HeapAddress> SymmetricHeap::find(const void* ptr, std::size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(ptr);
  const std::shared_lock lock(mutex_);
  const auto above = std::ranges::upper_bound(ranges_, address, {}, &Range::begin);
  for (auto next = std::reverse_iterator(above); next != ranges_.rend(); ++next) {
    if (next->furthest <= address) break;
    if (address >= next->end || bytes > static_cast<std::size_t>(next->end - address)) continue;
    return HeapAddress{.segment = next->number,
                       .offset = static_cast<std::size_t>(address - next->begin)};
  }
  return std::nullopt;
}

std::byte* SymmetricHeap::address(int rank, HeapAddress place, std::size_t bytes) const {
  const HeapRange there = range(rank, place.segment);
  if (there.base == nullptr || place.offset > there.bytes) return nullptr;
  if (bytes > there.bytes - place.offset) return nullptr;
  return there.base + place.offset;
}

std::vector<SymmetricHeap::OfRank> SymmetricHeap::all() const {
  const std::shared_lock lock(mutex_);
  std::vector<OfRank> segments;
  for (const Entry& entry : entries_) segments.push_back(entry.of_rank);
  return segments;
}

HeapRange SymmetricHeap::range(int rank, std::uint32_t number) const {
  const std::shared_lock lock(mutex_);
  const Segment* there = segment(number, rank);
  return there != nullptr ? HeapRange{there->base(), there->bytes()} : HeapRange{nullptr, 0};
}

void SymmetricHeap::insert_range(const Segment* own, std::uint32_t number) {
  if (own == nullptr) return;
  const Range range{own->base(), own->base() + own->bytes(), nullptr, number};
  ranges_.insert(std::ranges::upper_bound(ranges_, range.begin, {}, &Range::begin), range);
  update_furthest();
}

void SymmetricHeap::erase_range(std::uint32_t number) {
  std::erase_if(ranges_, [=](const Range& range) { return range.number == number; });
  update_furthest();
}

void SymmetricHeap::update_furthest() {
  const std::byte* furthest = nullptr;
  for (Range& range : ranges_) range.furthest = furthest = std::max(furthest, range.end);
}

// Null if there is no such segment. The caller holds the lock.
const Segment* SymmetricHeap::segment(std::uint32_t number, int rank) const {
  if (number >= entries_.size() || entries_[number].of_rank.empty()) return nullptr;
  return entries_[number].of_rank[at(rank)].get();
}

bool SymmetricHeap::huge_pages() const {
  const std::shared_lock lock(mutex_);
  return !number_of_zone_.empty() && std::ranges::all_of(number_of_zone_, [this](auto number) {
    const Segment* own = segment(number, rank_);
    return own == nullptr || own->huge_pages();
  });
}

}  // namespace xd
