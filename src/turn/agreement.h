// Agreement of the ranks when they begin a sequence: every rank gives a plain struct, and all ranks
// get all of them.
#pragma once

#include <cstdint>
#include <cstring>
#include <span>
#include <type_traits>
#include <vector>

#include "comm/comm.h"

namespace xd::turn {

// Collective: returns the results of `make` on all ranks. If it throws on some rank, that rank
// rethrows and the others throw MISMATCH.
template <class Make, class T = std::invoke_result_t<Make>>
std::vector<T> agree_on(Comm& comm, CollectiveCall what, Make&& make) {
  static_assert(std::is_trivially_copyable_v<T>);
  const auto items = comm.agree(what, [&] {
    const T mine = make();
    Comm::Contribution contribution{.blob = Bytes(sizeof(mine))};
    std::memcpy(contribution.blob.data(), &mine, sizeof(mine));
    return contribution;
  });
  std::vector<T> of_rank(items.size());
  for (std::size_t r = 0; r < items.size(); ++r) {
    if (items[r].blob.size() != sizeof(T)) {
      fail(XD_ERROR_MISMATCH, "rank ", r, " runs another version of the library");
    }
    std::memcpy(&of_rank[r], items[r].blob.data(), sizeof(T));
  }
  return of_rank;
}

// A number that must be equal on all ranks, by its name in the public config.
template <class T>
struct EqualField {
  const char* name;
  std::int64_t T::*value;
};

// Every rank compares all ranks with rank 0, so all come to the same verdict.
template <class T>
void require_equal(std::span<const EqualField<T>> fields, std::span<const T> of_rank) {
  for (std::size_t r = 1; r < of_rank.size(); ++r) {
    for (const EqualField<T>& field : fields) {
      const std::int64_t first = of_rank[0].*field.value, other = of_rank[r].*field.value;
      if (first != other) {
        fail(XD_ERROR_MISMATCH, "config.", field.name, " = ", first, " on rank 0 and ", other,
             " on rank ", r, ", expected equal values");
      }
    }
  }
}

}  // namespace xd::turn
