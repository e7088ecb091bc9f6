// The needs of ranks on several hosts, besides those of all ranks: the job's secret, and addresses
// at which they reach one another.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/tcp.h"
#include "meet/introduction.h"
#include "meet/rank_names.h"

namespace xd {

// By rank, the number of its host; hosts are numbered from 0, by their lowest ranks.
std::vector<int> number_hosts(std::span<const Introduction> introductions);
// By host, the system's name for it.
std::vector<std::string> node_names(std::span<const Introduction> introductions,
                                    std::span<const int> host_of);

// The address of a rank that has one.
TcpAddress control_address(const Introduction& introduction);
// Fills in the address of this rank.
void introduce_address(Introduction& introduction, const TcpAddress& address);

// Checks what ranks on several hosts must have. All ranks throw together: INVALID_ARGUMENT the
// ranks that lack the job's secret or an address, MISMATCH the others and all where the ranks do
// not fit together (one name for two hosts, other secrets, addresses of two families, addresses
// that only their own host reaches).
void check_several_hosts(int rank, std::span<const Introduction> introductions,
                         std::string_view job_secret, const RankNames& names);

}  // namespace xd
