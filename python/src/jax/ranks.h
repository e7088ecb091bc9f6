// The ranks of this process: one communicator per device.
#pragma once

#include <crossdock/crossdock.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "problem.h"

namespace xdjax {

// The ordinal in a process that has one device only.
inline constexpr int any_ordinal = -1;

// The place of one local device.
struct RankInfo {
  int ordinal = 0;                // XLA's number of the device in custom calls, or any_ordinal
  int device = 0;                 // the CUDA device; 0 on the CPU
  int rank = 0;                   // the rank in its set of ranks,
  int num_ranks = 0;              // the size of that set,
  std::string unique_id;          // its meeting point,
  std::string name;               // its name, as people see it,
  std::vector<int> global_ranks;  // and other numbers of its ranks, or none
};

class Ranks {
 public:
  struct Rank {
    int ordinal = 0;
    int rank = 0;
    DLDevice device{};
    xd_comm* comm = nullptr;
  };

  // Joins the communicators of all ranks of this process at once. Collective, blocking. Throws
  // Problem.
  Ranks(DLDeviceType device_type, const std::vector<RankInfo>& rank_infos, int timeout_ms);
  ~Ranks();
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;

  [[nodiscard]] const std::vector<Rank>& all() const { return ranks_; }

  // Makes memory of each rank, [pointers[i], + bytes[i]), part of its symmetric memory. Collective,
  // blocking.
  std::optional<Problem> register_memory(const std::vector<std::uintptr_t>& pointers,
                                         const std::vector<std::size_t>& bytes);

 private:
  void leave();

  std::vector<Rank> ranks_;
};

}  // namespace xdjax
