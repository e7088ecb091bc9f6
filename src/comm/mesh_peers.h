// The processes behind the ranks: the unit in which peers die.
#pragma once

#include <span>
#include <vector>

#include "base/fd.h"
#include "comm/mesh_introduction.h"

namespace xd {

struct PeerProcess {
  std::vector<int> ranks;  // ascending
  UniqueFd pidfd;          // readable once the process has ended; empty where the system has none
};

struct PeerProcesses {
  std::vector<PeerProcess> processes;
  std::vector<int> of_rank;  // index into `processes`
  int local_ranks = 0;       // ranks of the calling process, `rank` included
  int shortage = 0;          // errno: some pidfd is missing as this process has no descriptor left
};

// Groups the ranks. Those of the calling process are one "process" each: they cannot die, only
// leave. Throws PEER_LOST if a process is gone already.
PeerProcesses find_processes(int rank, std::span<const Introduction> introductions);

}  // namespace xd
