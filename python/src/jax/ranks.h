// The ranks of this process: one communicator per device.
#pragma once

#include <crossdock/crossdock.h>

#include <memory>
#include <string>
#include <vector>

#include "problem.h"

namespace xdjax {

// The place of one local device.
struct Seat {
  int ordinal = 0;        // the device's, as XLA counts those of this process
  int rank = 0;           // in its set of ranks ...
  int num_ranks = 0;      // ... of this size ...
  std::string unique_id;  // ... that meets here
};

class Ranks {
 public:
  struct Rank {
    int ordinal = 0;
    DLDevice device{};
    xd_comm* comm = nullptr;
  };

  // Joins the communicators of all seats at once. Collective, blocking. Throws Problem.
  Ranks(DLDeviceType device_type, const std::vector<Seat>& seats, int timeout_ms,
        const std::string& name);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] const std::vector<Rank>& all() const { return ranks_; }

 private:
  void leave();

  std::vector<Rank> ranks_;
};

}  // namespace xdjax
