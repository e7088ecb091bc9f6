// Host code reaches the memory of near ranks (comm/hosts.h) through NearMemory, and in no other
// way.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>
#include <vector>

#include "base/math.h"
#include "comm/hosts.h"
#include "memory/segment.h"

namespace xd {

// A piece of a near rank's memory: the address in this process at which it begins. A piece does not
// know its length; code that makes one has seen that all of it is there.
class NearMemory {
 public:
  NearMemory() = default;  // no memory
  explicit NearMemory(std::byte* address) : address_(address) {}
  explicit operator bool() const { return address_ != nullptr; }

  // The piece that begins `offset` bytes further on.
  NearMemory from(std::uint64_t offset) const { return NearMemory(address_ + offset); }

  // ---- Loads and stores of bytes, which have no order by themselves ----

  std::byte* address(std::uint64_t offset = 0) const { return address_ + offset; }
  template <class T>
  T* array() const {
    return reinterpret_cast<T*>(address_);
  }

  // ---- Signals: the word at which the piece begins ----

  // Release: a rank that has seen this word also sees all that was stored before.
  void signal(std::uint64_t word) const { this->word().store(word, std::memory_order_release); }
  // Acquire: the other side of signal().
  std::uint64_t seen() const { return word().load(std::memory_order_acquire); }

 private:
  using Word = std::atomic<std::uint64_t>;
  static_assert(Word::is_always_lock_free);
  Word& word() const { return *array<Word>(); }

  std::byte* address_ = nullptr;
};

// One piece of each near rank's memory.
class NearTable {
 public:
  // `segments` are by rank, and outlive the table.
  explicit NearTable(const std::vector<std::shared_ptr<Segment>>& segments) {
    for (const auto& segment : segments) {
      pieces_.push_back(segment ? NearMemory(segment->base()) : NearMemory());
    }
  }

  NearMemory of(NearRank rank) const { return pieces_[at(rank)]; }

 private:
  std::vector<NearMemory> pieces_;  // by rank
};

}  // namespace xd
