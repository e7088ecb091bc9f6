// A rank's note about the wait that it is in, once that has become long, and the place in its
// control segment where near ranks read it.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>

namespace xd {

struct WaitNote {
  std::uint64_t id = 0;      // tells this rank's waits apart; 0 = it is in none that is long
  std::uint64_t epoch = 0;   // of the operation; of a host call, which all_gather
  std::int64_t seen_ms = 0;  // when it last looked, by its machine's steady clock
  // A place where other ranks wait, and to which this rank has not come.
  std::uint64_t confirmed_epoch = 0;
  std::int32_t confirms = 0;  // 1 = there is such a place
  std::int32_t confirmed_group = -1, confirmed_operation = -1, confirmed_phase = 0;
  std::int32_t joins = 0;  // 1 = it waits in a host call, and can take its turn at that place
  std::int32_t peer = -1;  // the rank that it waits for
  std::int32_t group = -1, operation = -1;  // -1: a host call
  std::int32_t phase = 0;                   // xd_phase
  std::int32_t several_threads = 0;         // 1 = not all calls have come from one thread
  std::int32_t pause_ms = 0;                // between machines: until its next note
  std::int32_t unused = 0;
  std::array<char, 128> call{};  // where it waits, for error texts

  void confirm(const WaitNote& place) {
    confirms = 1;
    confirmed_group = place.group;
    confirmed_operation = place.operation;
    confirmed_phase = place.phase;
    confirmed_epoch = place.epoch;
  }
  // True if it has confirmed the place where that rank waits.
  bool has_confirmed(const WaitNote& there) const {
    return confirms != 0 && confirmed_group == there.group &&
           confirmed_operation == there.operation && confirmed_phase == there.phase &&
           confirmed_epoch == there.epoch;
  }
};
static_assert(std::has_unique_object_representations_v<WaitNote> && sizeof(WaitNote) % 8 == 0);

// One writer, and readers in any process. A reader gets a note whole, or none:
//
//   writer  version odd; release fence; words; version even (release)
//   reader  version (acquire); words; acquire fence; version again, which must be the same even one
//
// A reader that finds a word of the next note also finds the odd version, by the two fences. All
// words are atomic and relaxed. A note orders nothing else: who reads it goes by its own course.
class WaitNotePlace {
 public:
  void write(const WaitNote& note) {
    std::array<std::uint64_t, kWords> words;
    std::memcpy(words.data(), &note, sizeof(note));
    const std::uint64_t odd = version_.load(std::memory_order_relaxed) | 1;  // see versioned.h
    version_.store(odd, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(odd + 1, std::memory_order_release);
  }
  // A note that is being written meanwhile is none.
  WaitNote read() const {
    std::array<std::uint64_t, kWords> words;
    const std::uint64_t version = version_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    WaitNote note;
    if (version % 2 != 0 || version_.load(std::memory_order_relaxed) != version) return note;
    std::memcpy(static_cast<void*>(&note), words.data(), sizeof(note));
    return note;
  }

 private:
  static constexpr std::size_t kWords = sizeof(WaitNote) / sizeof(std::uint64_t);
  std::atomic<std::uint64_t> version_{0};
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

}  // namespace xd
