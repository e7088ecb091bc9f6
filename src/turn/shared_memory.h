// The memory that the near ranks share for a sequence of operations, at this process' addresses.
#pragma once

#include <cstddef>
#include <cstdint>
#include <utility>

#include "base/error.h"
#include "base/math.h"
#include "comm/comm.h"
#include "comm/near_memory.h"
#include "turn/peer_address.h"

namespace xd::turn {

class SharedMemory {
 public:
  explicit SharedMemory(Segments segments) : segments_(std::move(segments)), areas_(segments_) {}

  const NearTable& areas() const { return areas_; }
  const Segments& segments() const { return segments_; }
  NearMemory area_of(NearRank rank, std::uint64_t offset) const {
    return areas_.of(rank).from(offset);
  }

  // `bytes` bytes of a rank's tensor, which lies here or in its symmetric memory. Throws MISMATCH
  // if its record names neither, or a place at which elements of this alignment cannot start.
  NearMemory tensor_of(const Comm& comm, NearRank rank, PeerAddress address, std::uint64_t bytes,
                       std::uint64_t alignment) const {
    const HeapRange shared{areas_.of(rank).address(), segments_[at(rank)]->bytes()};
    std::byte* const found =
        find_peer_memory(address, bytes, alignment, shared, [&](std::uint64_t segment) {
          return comm.heap().range(rank, static_cast<std::uint32_t>(segment));
        });
    if (found != nullptr) return NearMemory(found);
    fail(XD_ERROR_MISMATCH, "rank ", int{rank}, " offers a tensor outside its shared memory");
  }

 private:
  const Segments segments_;  // by rank
  const NearTable areas_;
};

}  // namespace xd::turn
