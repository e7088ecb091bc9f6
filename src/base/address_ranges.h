// A set of addresses that something is known of, as ranges. Not thread-safe.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <map>

namespace xd {

// [first, end)
struct AddressRange {
  std::uintptr_t first, end;
};

class AddressRanges {
 public:
  // More are forgotten, all at once: what is known can be found out again.
  static constexpr std::size_t kMost = 1024;

  // All of a range is known. An empty one is.
  bool contains(AddressRange range) const {
    if (range.first >= range.end) return true;
    const auto next = end_of_.upper_bound(range.first);
    return next != end_of_.begin() && std::prev(next)->second >= range.end;
  }

  // Ranges that overlap or touch become one.
  void add(AddressRange range) {
    if (range.first >= range.end) return;
    if (end_of_.size() >= kMost) end_of_.clear();
    auto next = end_of_.upper_bound(range.first);
    if (next != end_of_.begin() && std::prev(next)->second >= range.first) --next;
    while (next != end_of_.end() && next->first <= range.end) {
      range = {std::min(range.first, next->first), std::max(range.end, next->second)};
      next = end_of_.erase(next);
    }
    end_of_.emplace(range.first, range.end);
  }

  std::size_t count() const { return end_of_.size(); }

 private:
  std::map<std::uintptr_t, std::uintptr_t> end_of_;  // by first address; apart from each other
};

}  // namespace xd
