// The names of operations. Families hand them over, so that the communicator can put them into
// error texts.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <span>

namespace xd {

// A collective call of the host, by the name of its C function: ranks that call different ones are
// told which.
struct CollectiveCall {
  const char* name;
};

// A family's operations, numbered from `first`, as error texts name them. No two families of a
// communicator have an operation of the same number, so the number alone tells which one is meant.
struct Operations {
  const char* prefix;  // prefix of their functions, "xd_ep_"
  const char* type;    // type of their numbers, "an xd_ep_operation"
  std::int32_t first;
  std::span<const char* const> names;
  // Each operation from this number on has a pipeline: an epoch counts that operation alone. One
  // epoch of the group counts all operations below.
  std::int32_t first_pipeline = std::numeric_limits<std::int32_t>::max();
  // More operations, with numbers behind those of all families, which statistics do not count.
  struct Rare {
    std::int32_t number;
    const char* name;
  };
  std::span<const Rare> rare{};

  constexpr bool knows(std::int32_t operation) const {
    return contains(operation) || rare_name(operation) != nullptr;
  }
  // One that statistics count.
  constexpr bool contains(std::int32_t operation) const {
    return operation >= first && static_cast<std::size_t>(operation - first) < names.size();
  }
  // Whether one epoch counts both.
  constexpr bool counts_together(std::int32_t a, std::int32_t b) const {
    return a == b || (a < first_pipeline && b < first_pipeline);
  }
  constexpr const char* name(std::int32_t operation) const {
    if (contains(operation)) return names[static_cast<std::size_t>(operation - first)];
    return knows(operation) ? rare_name(operation) : "?";
  }

 private:
  constexpr const char* rare_name(std::int32_t operation) const {
    for (const Rare& other : rare) {
      if (other.number == operation) return other.name;
    }
    return nullptr;
  }
};

}  // namespace xd
