#include "comm/symmetric_heap.h"

#include <algorithm>
#include <mutex>

#include "base/error.h"
#include "base/math.h"
#include "comm/device_comm.h"

namespace xd {

void SymmetricHeap::make_room() {
  const std::unique_lock lock(mutex_);
  segments_.reserve(segments_.size() + 1);
  ranges_.reserve(ranges_.size() + 1);
  heap_.make_room();
}

void SymmetricHeap::add(std::vector<std::shared_ptr<Segment>> segment_of_rank) {
  const Segment* own = segment_of_rank[at(rank_)].get();
  const std::size_t bytes = own != nullptr ? own->bytes() : 0;
  const std::unique_lock lock(mutex_);
  insert_range(own, static_cast<std::uint32_t>(segments_.size()));
  segments_.push_back(std::move(segment_of_rank));
  heap_.add_segment(bytes);
}

std::uint32_t SymmetricHeap::next_segment() const {
  const std::shared_lock lock(mutex_);
  return static_cast<std::uint32_t>(segments_.size());
}

void SymmetricHeap::add_registered(Registered&& more) noexcept {
  const std::unique_lock lock(mutex_);
  for (const auto& [number, of_rank] : more) insert_range(of_rank[at(rank_)].get(), number);
  registered_.merge(more);
}

std::optional<std::uint32_t> SymmetricHeap::next_registered() const {
  const std::shared_lock lock(mutex_);
  if (count() >= kMaxHeapSegments) return std::nullopt;
  std::uint32_t number = kMaxHeapSegments - 1;
  while (registered_.contains(number)) --number;
  return number;
}

bool SymmetricHeap::is_registered(std::uint32_t segment) const {
  const std::shared_lock lock(mutex_);
  return registered_.contains(segment);
}

void SymmetricHeap::remove_registered(std::uint32_t segment) {
  const std::unique_lock lock(mutex_);
  erase_range(segment);
  registered_.erase(segment);
}

void SymmetricHeap::require_room() const {
  const std::shared_lock lock(mutex_);
  if (registered_.contains(static_cast<std::uint32_t>(segments_.size())) ||
      count() >= kMaxHeapSegments) {
    fail(XD_ERROR_OUT_OF_MEMORY, "symmetric memory has ", count(),
         " segments, growths and registrations together, expected at most ", kMaxHeapSegments);
  }
}

void* SymmetricHeap::allocate(std::size_t bytes) {
  return address(rank_, heap_.allocate(bytes), 1);
}

bool SymmetricHeap::release(void* ptr) {
  const auto place = find(ptr, 1);
  return place && heap_.release(*place);
}

std::optional<Place> SymmetricHeap::find(const void* ptr, std::size_t bytes) const {
  const auto* address = static_cast<const std::byte*>(ptr);
  const std::shared_lock lock(mutex_);
  const auto above = std::ranges::upper_bound(ranges_, address, {}, &Range::begin);
  for (auto next = std::reverse_iterator(above); next != ranges_.rend(); ++next) {
    if (next->furthest <= address) break;
    if (address >= next->end || bytes > static_cast<std::size_t>(next->end - address)) continue;
    return Place{.segment = next->number,
                 .offset = static_cast<std::size_t>(address - next->begin)};
  }
  return std::nullopt;
}

std::byte* SymmetricHeap::address(int rank, Place place, std::size_t bytes) const {
  const std::shared_lock lock(mutex_);
  const Segment* there = segment(place.segment, rank);
  if (there == nullptr || place.offset > there->bytes()) return nullptr;
  if (bytes > there->bytes() - place.offset) return nullptr;
  return there->base() + place.offset;
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

// Null if there is none. Under the lock.
const Segment* SymmetricHeap::segment(std::uint32_t number, int rank) const {
  if (number < segments_.size()) return segments_[number][at(rank)].get();
  const auto found = registered_.find(number);
  return found != registered_.end() ? found->second[at(rank)].get() : nullptr;
}

bool SymmetricHeap::huge_pages() const {
  const std::shared_lock lock(mutex_);
  return !segments_.empty() && std::ranges::all_of(segments_, [this](const auto& of_rank) {
    const Segment* own = of_rank[at(rank_)].get();
    return own == nullptr || own->huge_pages();
  });
}

}  // namespace xd
