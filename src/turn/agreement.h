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

  std::string shown(std::int64_t number) const {
    const char* const text = word != nullptr ? word(number) : nullptr;
    return text != nullptr ? std::string(text) : std::to_string(number);
  }
};

// Every rank compares all ranks with rank 0, so all come to the same verdict.
template <class T>
void require_equal(std::span<const EqualField<T>> fields, std::span<const T> of_rank) {
  for (std::size_t r = 1; r < of_rank.size(); ++r) {
    for (const EqualField<T>& field : fields) {
      const std::int64_t first = of_rank[0].*field.value, other = of_rank[r].*field.value;
      if (first != other) {
        fail(XD_ERROR_MISMATCH, "config.", field.name, " = ", field.shown(first), " on rank 0 and ",
             field.shown(other), " on rank ", r, ", expected equal values");
      }
    }
  }
}

// The same for a rank that takes over a sequence which the others have.
template <class T>
void require_as_theirs(std::span<const EqualField<T>> fields, const T& theirs, const T& mine) {
  for (const EqualField<T>& field : fields) {
    XD_REQUIRE(mine.*field.value == theirs.*field.value, "config.", field.name, " = ",
               field.shown(mine.*field.value), ", expected ", field.shown(theirs.*field.value),
               " as the others have it");
  }
}

}  // namespace xd::turn
