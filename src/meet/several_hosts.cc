#include "meet/several_hosts.h"

#include <algorithm>
#include <cstring>
#include <map>

#include "base/error.h"
#include "base/math.h"

namespace xd {
namespace {

// Fails on all ranks for a mistake of rank `of`.
template <class... Parts>
[[noreturn]] void fail_for(int of, int rank, const RankNames& names, const Parts&... parts) {
  if (of == rank) fail(XD_ERROR_INVALID_ARGUMENT, parts...);
  fail(XD_ERROR_MISMATCH, names.of(of), " failed: ", parts...);
}

// Ranks of one name share memory, or are to.
void check_names(std::span<const Introduction> introductions, const RankNames& names) {
  std::map<HostName, std::size_t> first;
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    const Introduction& rank = introductions[r];
    if (rank.host_name[0] == '\0') continue;
    const std::size_t other = first.emplace(rank.host_name, r).first->second;
    if (introductions[other].host == rank.host) continue;
    const std::string_view name(rank.host_name.data(),
                                ::strnlen(rank.host_name.data(), rank.host_name.size()));
    fail(XD_ERROR_MISMATCH, "config.host = '", name, "' on ", names.of(static_cast<int>(other)),
         " and ", names.of(static_cast<int>(r)),
         ", which are two machines or network namespaces, expected a name for each");
  }
}

void check_secrets(int rank, std::span<const Introduction> introductions,
                   std::string_view job_secret, const RankNames& names) {
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    if (introductions[r].job_proof != Proof{}) continue;
    fail_for(static_cast<int>(r), rank, names,
             "XD_JOB_SECRET is not set, expected the same unguessable text on all ranks, since "
             "they are on several hosts");
  }
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    if (knows_job(introductions[r], job_secret)) continue;
    fail(XD_ERROR_MISMATCH, names.of(static_cast<int>(r)), " has another XD_JOB_SECRET than ",
         names.of(rank), ", expected the same on all ranks");
  }
}

// An address of a host's own loopback interface is good between parts of that host alone.
void check_reach(int rank, const TcpAddress& address, std::span<const Introduction> introductions,
                 const RankNames& names) {
  if (!address.is_loopback()) return;
  const HostIdentity& host = introductions[at(rank)].host;
  const auto other = std::ranges::find_if(introductions, [&](const Introduction& introduction) {
    return introduction.host.boot_id != host.boot_id ||
           introduction.host.network_namespace != host.network_namespace;
  });
  if (other == introductions.end()) return;
  fail(XD_ERROR_MISMATCH, names.of(rank), " has the address ", address.host(), ", which ",
       names.of(static_cast<int>(other - introductions.begin())),
       " cannot reach: config.net_interface or XD_NET_IFACE choose another");
}

}  // namespace

std::vector<int> number_hosts(std::span<const Introduction> introductions) {
  std::vector<int> host_of;
  int hosts = 0;
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    std::size_t first = 0;  // the lowest rank of the same host
    while (!(introductions[first].host == introductions[r].host)) ++first;
    host_of.push_back(first < r ? host_of[first] : hosts++);
  }
  return host_of;
}

std::vector<std::string> node_names(std::span<const Introduction> introductions,
                                    std::span<const int> host_of) {
  std::vector<std::string> names;
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    const HostName& name = introductions[r].node_name;
    if (at(host_of[r]) == names.size())
      names.emplace_back(name.data(), ::strnlen(name.data(), name.size()));
  }
  return names;
}

TcpAddress control_address(const Introduction& introduction) {
  const ControlAddress& place = introduction.address;
  const std::string host(place.host.data(), ::strnlen(place.host.data(), place.host.size()));
  const auto address = numeric_address(host);
  if (!address) fail(XD_ERROR_MISMATCH, "a rank's address is '", host, "', expected numbers");
  if (const char* flaw = address->flaw())
    fail(XD_ERROR_MISMATCH, "a rank's address is ", flaw, " address, ", host,
         ", expected one of its own");
  return address->with_port(place.port);
}

void introduce_address(Introduction& introduction, const TcpAddress& address) {
  const std::string host = address.host();
  XD_CHECK(host.size() < introduction.address.host.size());
  introduction.address = {};
  std::ranges::copy(host, introduction.address.host.begin());
  introduction.address.port = address.port();
}

void check_several_hosts(int rank, std::span<const Introduction> introductions,
                         std::string_view job_secret, const RankNames& names) {
  check_names(introductions, names);
  check_secrets(rank, introductions, job_secret, names);
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    const Introduction& other = introductions[r];
    if (other.address.port != 0) continue;
    const std::string_view reason = failure_of(other);
    fail_for(static_cast<int>(r), rank, names, "the ranks are on several hosts, and ",
             reason.empty() ? "the meeting point is at a loopback address, which is no way to "
                              "them: name the interface in config.net_interface or XD_NET_IFACE"
                            : reason);
  }
  const TcpAddress first = control_address(introductions[0]);
  for (std::size_t r = 0; r < introductions.size(); ++r) {
    const TcpAddress other = control_address(introductions[r]);
    check_reach(static_cast<int>(r), other, introductions, names);
    if (other.is_ipv6() != first.is_ipv6())
      fail(XD_ERROR_MISMATCH, names.of(0), " has the address ", first.host(), " and ",
           names.of(static_cast<int>(r)), " ", other.host(),
           ", expected addresses of one family: config.net_interface or XD_NET_IFACE choose them");
  }
}

}  // namespace xd
