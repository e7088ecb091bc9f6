// All that a rank knows of the ranks of its communicator once they have met.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "meet/handshake.h"
#include "meet/introduction.h"
#include "meet/rails.h"
#include "meet/rank_names.h"

namespace xd {

struct MetRanks {
  // Throws what host_names() and check_several_hosts() throw.
  // `numbers`: the caller's for the ranks, in texts; nullptr = none.
  static MetRanks of(int rank, std::vector<Introduction> introductions,
                     std::string_view job_secret = {}, const std::int32_t* numbers = nullptr);

  // For a rank that has joined the others of its machine later. `host_names` as below; `pidfds` and
  // `pids` are by rank, with none for ranks that are gone.
  static MetRanks of_joined(int rank, std::vector<std::string> host_names,
                            std::vector<UniqueFd> pidfds, const std::vector<std::int64_t>& pids,
                            const std::int32_t* numbers);

  int rank() const { return rails.rank(); }
  int num_ranks() const { return rails.num_ranks(); }

  std::vector<Introduction> introductions;  // by rank
  std::vector<std::string> host_names;      // as the callers name them, by rank; empty: they do not
  Rails rails;
  RankNames names;
  PeerProcesses processes;
  Secret secret;  // of their connections
};

}  // namespace xd
