// A set of addresses about which one fact is known, as ranges. It never allocates. Not thread-safe.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

namespace xd {

// [first, end)
struct AddressRange {
  std::uintptr_t first, end;
};

class AddressRanges {
 public:
  // A set that would need more ranges forgets all of them: its user can find the fact out again.
  static constexpr std::size_t kMost = 1024;

  // True if all of the range is known. An empty range is.
  bool contains(AddressRange range) const {
    if (range.first >= range.end) return true;
    const AddressRange* const next = behind(range.first);
    return next != ranges_.data() && next[-1].end >= range.end;
  }

  // Ranges that overlap or touch become one.
  void add(AddressRange range) {
    if (range.first >= range.end) return;
    if (count_ == kMost) count_ = 0;
    AddressRange* const end = ranges_.data() + count_;
    AddressRange* first = ranges_.data() + (behind(range.first) - ranges_.data());
    if (first != ranges_.data() && first[-1].end >= range.first) --first;
    AddressRange* last = first;  // [first, last) become one with the range
    for (; last != end && last->first <= range.end; ++last) {
      range = {std::min(range.first, last->first), std::max(range.end, last->end)};
    }
    if (last == first) {
      std::copy_backward(first, end, end + 1);
    } else {
      std::copy(last, end, first + 1);
    }
    *first = range;
    count_ = count_ + 1 - static_cast<std::size_t>(last - first);
  }

  std::size_t count() const { return count_; }

 private:
  // The first range that begins behind an address.
  const AddressRange* behind(std::uintptr_t address) const {
    return std::upper_bound(
        ranges_.data(), ranges_.data() + count_, address,
        [](std::uintptr_t value, const AddressRange& range) { return value < range.first; });
  }

  std::array<AddressRange, kMost> ranges_;  // in order, apart from each other
  std::size_t count_ = 0;
};

}  // namespace xd
