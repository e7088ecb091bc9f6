// Agreement of the ranks when they begin a sequence: every rank gives a plain struct, and all ranks
// get all of them.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "base/error.h"

namespace xd::turn {

// A number that must be equal on all ranks, by its name in the public config.
template <class T>
struct EqualField {
  const char* name;
  std::int64_t T::*value;
  const char* (*word)(std::int64_t) = nullptr;  // for texts; nullptr = the number
};

// Every rank compares all ranks with rank 0, so all come to the same verdict.
template <class T>
void require_equal(std::span<const EqualField<T>> fields, std::span<const T> of_rank) {
  for (std::size_t r = 1; r < of_rank.size(); ++r) {
    for (const EqualField<T>& field : fields) {
      const std::int64_t first = of_rank[0].*field.value, other = of_rank[r].*field.value;
      if (first != other) {
        const auto shown = [&](std::int64_t value) {
          const char* const word = field.word != nullptr ? field.word(value) : nullptr;
          return word != nullptr ? std::string(word) : std::to_string(value);
        };
        fail(XD_ERROR_MISMATCH, "config.", field.name, " = ", shown(first), " on rank 0 and ",
             shown(other), " on rank ", r, ", expected equal values");
      }
    }
  }
}

}  // namespace xd::turn
