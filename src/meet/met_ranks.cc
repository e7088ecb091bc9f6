#include "meet/met_ranks.h"

#include <algorithm>
#include <utility>

#include "base/math.h"
#include "meet/several_hosts.h"

namespace xd {
namespace {

// Hosts as callers name them, numbered by their lowest ranks.
RankNames name_by(const std::vector<std::string>& names) {
  std::vector<int> host_of;
  std::vector<std::string> hosts;
  for (const std::string& name : names) {
    const auto known = std::ranges::find(hosts, name);
    host_of.push_back(static_cast<int>(known - hosts.begin()));
    if (known == hosts.end()) hosts.push_back(name);
  }
  return {host_of, std::move(hosts)};
}

std::vector<std::int64_t> pids_of(const std::vector<Introduction>& introductions) {
  std::vector<std::int64_t> pids;
  for (const Introduction& introduction : introductions) pids.push_back(introduction.process.pid);
  return pids;
}

}  // namespace

MetRanks MetRanks::of(int rank, std::vector<Introduction> introductions,
                      std::string_view job_secret, const std::int32_t* numbers) {
  const std::vector<int> host_of = number_hosts(introductions);
  std::vector<std::string> declared = xd::host_names(introductions);
  RankNames names =
      declared.empty() ? RankNames(host_of, node_names(introductions, host_of)) : name_by(declared);
  names.set_processes(pids_of(introductions));
  if (numbers != nullptr) names.set_numbers({numbers, numbers + introductions.size()});
  Rails rails(rank, host_of);
  const bool several = rails.num_hosts() > 1;
  if (several) check_several_hosts(rank, introductions, job_secret, names);
  PeerProcesses processes = find_processes(rank, introductions);
  const Secret secret = mesh_secret(introductions, several ? job_secret : std::string_view());
  return {.introductions = std::move(introductions),
          .host_names = std::move(declared),
          .rails = std::move(rails),
          .names = std::move(names),
          .processes = std::move(processes),
          .secret = secret};
}

MetRanks MetRanks::of_joined(int rank, std::vector<std::string> host_names,
                             std::vector<UniqueFd> pidfds, const std::vector<std::int64_t>& pids,
                             const std::int32_t* numbers) {
  const auto num_ranks = static_cast<int>(pids.size());
  RankNames names = host_names.empty() ? RankNames() : name_by(host_names);
  names.set_processes(pids);
  if (numbers != nullptr) names.set_numbers({numbers, numbers + pids.size()});
  // Each rank is a process of its own: those of one process end at one time.
  PeerProcesses processes;
  processes.local_ranks = 1;
  for (int r = 0; r < num_ranks; ++r) {
    processes.of_rank.push_back(r);
    processes.processes.push_back({.ranks = {r}, .pidfd = std::move(pidfds[at(r)])});
  }
  return {.introductions = {},
          .host_names = std::move(host_names),
          .rails = Rails(rank, std::vector<int>(at(num_ranks), 0)),
          .names = std::move(names),
          .processes = std::move(processes),
          .secret = {}};
}

}  // namespace xd
