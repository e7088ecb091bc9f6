#include "comm/mesh_peers.h"

#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/error.h"
#include "base/rank_list.h"

namespace xd {
namespace {

// An older kernel, a sandbox, or a process whose pid means something else here: its end is then
// noticed by its connection alone.
UniqueFd open_pidfd(const Introduction& own, const PeerProcess& process,
                    const ProcessIdentity& identity, int& shortage) {
  if (identity.pid_namespace != own.process.pid_namespace) return UniqueFd();
#ifdef SYS_pidfd_open
  UniqueFd fd(static_cast<int>(::syscall(SYS_pidfd_open, static_cast<pid_t>(identity.pid), 0)));
  // Should the pid have been given to another process meanwhile, the peer's connection will fail.
  if (!fd && errno == ESRCH)
    fail(XD_ERROR_PEER_LOST, rank_list(process.ranks), ": process ", identity.pid, " has ended");
  if (!fd && (errno == EMFILE || errno == ENFILE)) shortage = errno;
  return fd;
#else
  return UniqueFd();
#endif
}

}  // namespace

PeerProcesses find_processes(int rank, std::span<const Introduction> introductions) {
  const Introduction& own = introductions[static_cast<std::size_t>(rank)];
  PeerProcesses result;
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    const ProcessIdentity& identity = introductions[r].process;
    const bool is_local = identity == own.process;
    result.local_ranks += is_local ? 1 : 0;
    std::size_t first = 0;  // the lowest rank of the same process
    while (!is_local && !(introductions[first].process == identity)) ++first;
    if (!is_local && first < r) {
      result.of_rank.push_back(result.of_rank[first]);
    } else {
      result.of_rank.push_back(static_cast<int>(result.processes.size()));
      result.processes.emplace_back();
    }
    result.processes[static_cast<std::size_t>(result.of_rank[r])].ranks.push_back(
        static_cast<int>(r));
  }
  for (PeerProcess& process : result.processes) {
    const auto& identity = introductions[static_cast<std::size_t>(process.ranks[0])].process;
    if (!(identity == own.process))
      process.pidfd = open_pidfd(own, process, identity, result.shortage);
  }
  return result;
}

}  // namespace xd
