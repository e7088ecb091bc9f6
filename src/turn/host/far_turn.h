// The needs of turns on the host that have ranks on other machines.
//
// A far rank's memory has no address here. Its entry comes over the network to its gateway
// (comm/remote/routes.h), which writes it into the memory of all near ranks, as the far rank would.
// So every rank awaits the entries of all ranks in its own memory. Done flags are those of near
// ranks alone: no far rank touches memory here, and a gateway raises its own when it has done there
// what far ranks have asked of it.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/comm.h"

namespace xd::turn {

template <class Record>
class FarTurn : public Progress {
 public:
  virtual const std::vector<int>& ranks() const = 0;  // all far ranks
  // Tells them what this rank is about to do. Waits for nobody.
  virtual void enter(const Record& record) = 0;
  // Everything that this rank has sent was read.
  virtual bool at_rest() const = 0;
  // The rank that keeps this one from its rest; -1 = not known.
  virtual int late() const = 0;

 protected:
  ~FarTurn() = default;
};

}  // namespace xd::turn
