#include "comm/symmetric_heap.h"

#include <algorithm>
#include <mutex>

namespace xd {

void SymmetricHeap::add(std::vector<std::shared_ptr<Segment>> segment_of_rank) {
  const Segment* own = segment_of_rank[static_cast<std::size_t>(rank_)].get();
  const std::size_t bytes = own != nullptr ? own->bytes() : 0;
  const std::unique_lock lock(mutex_);
  segments_.push_back(std::move(segment_of_rank));
  heap_.add_segment(bytes);
}

void* SymmetricHeap::allocate(std::size_t bytes) {
  return address(rank_, heap_.allocate(bytes), 1);
}

bool SymmetricHeap::release(void* ptr) {
  const auto place = find(ptr, 1);
  return place && heap_.release(*place);
}

std::optional<Place> SymmetricHeap::find(const void* ptr, std::size_t bytes) const {
  const auto* at = static_cast<const std::byte*>(ptr);
  const std::shared_lock lock(mutex_);
  for (std::size_t i = 0; i < segments_.size(); ++i) {
    const Segment* segment = segments_[i][static_cast<std::size_t>(rank_)].get();
    if (segment == nullptr || !segment->contains(at)) continue;
    const auto offset = static_cast<std::size_t>(at - segment->base());
    if (bytes > segment->bytes() - offset) return std::nullopt;
    return Place{.segment = static_cast<std::uint32_t>(i), .offset = offset};
  }
  return std::nullopt;
}

std::byte* SymmetricHeap::address(int rank, Place place, std::size_t bytes) const {
  const std::shared_lock lock(mutex_);
  if (place.segment >= segments_.size()) return nullptr;
  const Segment* segment = segments_[place.segment][static_cast<std::size_t>(rank)].get();
  if (segment == nullptr || place.offset > segment->bytes()) return nullptr;
  if (bytes > segment->bytes() - place.offset) return nullptr;
  return segment->base() + place.offset;
}

bool SymmetricHeap::huge_pages() const {
  const std::shared_lock lock(mutex_);
  return !segments_.empty() && std::ranges::all_of(segments_, [this](const auto& of_rank) {
    const Segment* own = of_rank[static_cast<std::size_t>(rank_)].get();
    return own == nullptr || own->huge_pages();
  });
}

}  // namespace xd
