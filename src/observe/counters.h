// The numbers of one rank's part in a sequence of operations, as its process writes them and any
// process may read them.
//
// The thread that is in an operation of the sequence writes, and no other, so a number is increased
// by a load and a store. Everything is relaxed: readers get each number whole, and no order between
// them.
#pragma once

#include <crossdock/stats.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string_view>

namespace xd::observe {

class Number {
 public:
  void add(std::uint64_t more) { set(get() + more); }
  void set(std::uint64_t value) { value_.store(value, std::memory_order_relaxed); }
  std::uint64_t get() const { return value_.load(std::memory_order_relaxed); }

 private:
  std::atomic<std::uint64_t> value_{0};
};
static_assert(std::atomic<std::uint64_t>::is_always_lock_free && sizeof(Number) == 8);

// A short text, which may be replaced while others read it: they may then get parts of both.
class Text {
 public:
  static constexpr std::size_t kBytes = XD_STATS_TEXT_BYTES;
  using Bytes = std::array<char, kBytes>;  // zeros behind the text, at least one

  void set(std::string_view text) {
    std::array<std::uint64_t, kWords> words{};
    std::memcpy(words.data(), text.data(), std::min(text.size(), kBytes - 1));
    for (std::size_t i = 0; i < kWords; ++i) words_[i].set(words[i]);
  }
  Bytes get() const {
    std::array<std::uint64_t, kWords> words{};
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].get();
    Bytes text;
    std::memcpy(text.data(), words.data(), kBytes);
    text.back() = 0;
    return text;
  }

 private:
  static constexpr std::size_t kWords = kBytes / sizeof(std::uint64_t);
  std::array<Number, kWords> words_;
};

struct Identity {
  std::int32_t rank, num_ranks, number, device_type;
  std::int32_t first_operation = 0;
};

// A rank's waits, by peer, lie behind it: see waits().
struct alignas(64) Counters {
  // The operation that is going on, on a line of its own.
  Number operation;     // 1 + its number; 0 = none
  Number waits_for;     // 1 + the rank; 0 = none
  Number since;         // when the call began, as the clock counts
  Identity identity{};  // does not change
  // Below, whatever a call changes.
  alignas(64) std::array<Number, XD_STATS_OPERATIONS> calls;
  std::array<Number, XD_STATS_OPERATIONS> call_ns;
  Number failed_calls, tokens, token_bytes, rows, row_bytes, bad_ids, dropped_rows;
  Number net_puts, net_bytes, staged_tensors;
  Number counts_rows, measures_waits;
  Text comm, name, detail;

  Number* waits() { return reinterpret_cast<Number*>(this + 1); }
  const Number* waits() const { return reinterpret_cast<const Number*>(this + 1); }
  static constexpr std::size_t bytes(int ranks) {
    return sizeof(Counters) + static_cast<std::size_t>(ranks) * sizeof(Number);
  }
};

// All numbers but the waits, as the C API gives them.
xd_stats stats_of(const Counters& counters);
// Nanoseconds of a clock that all processes of a machine share.
std::uint64_t now_ns();
xd_stats_source source_of(const Counters& counters);

}  // namespace xd::observe
