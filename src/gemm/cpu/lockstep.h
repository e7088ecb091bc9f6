// A context's turns on the host (turn/host/turn.h), and the words and places that its ranks
// exchange inside an operation.
#pragma once

#include <cstdint>

#include "comm/near_memory.h"
#include "gemm/context.h"
#include "gemm/cpu/memory.h"
#include "turn/host/turn.h"
#include "turn/shared_memory.h"

namespace xd::gemm::cpu {

// The memory that the near ranks share for a context.
class ContextMemory {
 public:
  // Collective: allocates this rank's and maps the peers'.
  explicit ContextMemory(const Context& context);

  const Map& map() const { return map_; }
  NearMemory area_of(NearRank rank, std::uint64_t offset) const {
    return shared_.area_of(rank, offset);
  }

 protected:
  const turn::SharedMemory& shared() const { return shared_; }

 private:
  const Map map_;
  const turn::SharedMemory shared_;
};

class Lockstep : private ContextMemory, public turn::HostTurn<Record> {
 public:
  // Collective.
  explicit Lockstep(const Context& context);

  using ContextMemory::area_of, ContextMemory::map;

  // Tells every peer that this rank's word of an area (Map::ready, Map::summed) has come to this
  // operation.
  void tell_all(std::uint64_t area) const;
  // Likewise, where this rank has failed and what the word announces is not there; nothing where
  // the communicator is finished.
  void tell_all_failed(std::uint64_t area) const;
  // Returns when every peer has told this rank. Throws MISMATCH if one has failed.
  void await_all(std::uint64_t area) const;

  // As turn::SharedMemory has it.
  NearMemory tensor_of(NearRank rank, turn::PeerAddress address, std::uint64_t bytes) const {
    return shared().tensor_of(comm_, rank, address, bytes, sizeof(float));
  }

 private:
  // A bit beside the epoch: the rank that told has failed.
  static constexpr std::uint64_t kFailed = std::uint64_t{1} << 63;
  void post(NearRank peer, std::uint64_t area, std::uint64_t word) const;

  Comm& comm_;
};

}  // namespace xd::gemm::cpu
