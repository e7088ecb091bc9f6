// The needs of turns on the host that have ranks on other machines.
//
// A remote rank's memory has no address here. Its entry comes over the network to its relay
// (comm/remote/routes.h), which writes it into the memory of all near ranks, as the remote rank
// would. So every rank awaits the entries of all ranks in its own memory. Done flags are those of
// near ranks alone: no remote rank touches memory here, and a relay raises its own when it has done
// there what remote ranks have asked of it.
#pragma once

#include <cstdint>
#include <vector>

#include "comm/comm.h"

namespace xd::turn {

template <class Record>
class RemoteTurn : public Progress {
 public:
  virtual const std::vector<int>& ranks() const = 0;  // all remote ranks
  // Tells them what this rank is about to do. Waits for nobody.
  virtual void enter(const Record& record) = 0;
  // Everything that this rank has sent was read.
  virtual bool at_rest() const = 0;
  // The rank that keeps this one from its rest; -1 = not known.
  virtual int late() const = 0;

 protected:
  ~RemoteTurn() = default;
};

}  // namespace xd::turn
