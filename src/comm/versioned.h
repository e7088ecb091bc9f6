// A value in shared memory with one writer, and readers in any process.
//
// A reader gets a value whole, or none:
//
//   writer  version odd; release fence; words; version even (release)
//   reader  version (acquire); words; acquire fence; version again, which must be the same even one
//
// A reader that finds a word of the next value also finds the odd version, by the two fences. All
// words are atomic and relaxed. The place orders nothing else. A writer that dies in the middle
// leaves none, until another process takes its place and writes.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <optional>
#include <type_traits>

namespace xd {

template <class T>
class Versioned {
  static_assert(std::has_unique_object_representations_v<T> && sizeof(T) % 8 == 0);

 public:
  void write(const T& value) {
    std::array<std::uint64_t, kWords> words;
    std::memcpy(words.data(), &value, sizeof(value));
    const std::uint64_t odd = version_.load(std::memory_order_relaxed) | 1;
    version_.store(odd, std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_release);
    for (std::size_t i = 0; i < kWords; ++i) words_[i].store(words[i], std::memory_order_relaxed);
    version_.store(odd + 1, std::memory_order_release);
  }
  // None while it is being written.
  std::optional<T> read() const {
    std::array<std::uint64_t, kWords> words;
    const std::uint64_t version = version_.load(std::memory_order_acquire);
    for (std::size_t i = 0; i < kWords; ++i) words[i] = words_[i].load(std::memory_order_relaxed);
    std::atomic_thread_fence(std::memory_order_acquire);
    if (version % 2 != 0 || version_.load(std::memory_order_relaxed) != version) return {};
    T value;
    std::memcpy(static_cast<void*>(&value), words.data(), sizeof(value));
    return value;
  }

 private:
  static constexpr std::size_t kWords = sizeof(T) / sizeof(std::uint64_t);
  std::atomic<std::uint64_t> version_{0};
  std::array<std::atomic<std::uint64_t>, kWords> words_{};
};

}  // namespace xd
