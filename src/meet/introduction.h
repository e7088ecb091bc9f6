// The introduction of a rank through the bootstrap, by which the others can connect to it, and the
// processes behind the ranks, which follow from all introductions and are the unit of death.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/fd.h"
#include "base/wire.h"
#include "meet/handshake.h"

namespace xd {

// Processes with equal identities can pass each other descriptors over an abstract Unix socket:
// they run on the same kernel, in the same network namespace. A host name would tell neither.
struct HostIdentity {
  std::array<char, 36> boot_id;
  std::uint32_t part;  // the machine's network (comm/remote/network.h) may have several; else 0
  std::uint64_t network_namespace;
  bool operator==(const HostIdentity&) const = default;
};

// The place at which ranks on other hosts reach this rank.
struct ControlAddress {
  std::array<char, 62> host;  // numeric, then zeros; none = it has none
  std::uint16_t port;
};

// The pid alone would be the same in two containers, the random bytes alone in a forked child.
struct ProcessIdentity {
  std::uint64_t pid_namespace;
  std::int64_t pid;
  std::array<unsigned char, 16> random;
  bool operator==(const ProcessIdentity&) const = default;
};

// The host that a rank counts to, by the name that its caller gives it, with zeros behind it; all
// zeros where the caller gives none.
using HostName = std::array<char, 64>;
inline constexpr std::size_t kMaxHostBytes = std::tuple_size_v<HostName> - 1;

struct Introduction {
  std::uint32_t version;
  std::int32_t num_ranks;
  HostIdentity host;
  HostName host_name;
  HostName node_name;  // the system's name for the machine, for error texts only
  ProcessIdentity process;
  Tag socket_name;  // a random name
  Nonce nonce;      // this rank's share of the secret of the communicator
  Proof job_proof;  // proves that this rank knows the job's secret; zeros = it has none
  ControlAddress address;
  std::uint32_t failure_is_of_address;  // 1: it matters only if there are several hosts
  // The reason why this rank cannot take part; empty if it can. With a reason all fields but the
  // first two may be missing.
  std::array<char, 508> failure;
};

ProcessIdentity this_process();

// The introduction of the calling process, with a new socket name and nonce, and no address.
// `host_name` has at most kMaxHostBytes.
Introduction make_introduction(int num_ranks, std::string_view host_name = {},
                               std::string_view job_secret = {});
// The introduction of a rank that has failed. The exception in flight is the reason.
Introduction introduce_failure(int num_ranks) noexcept;
// Writes down that this rank has no address. The exception in flight is the reason.
void introduce_no_address(Introduction& introduction) noexcept;

std::string_view failure_of(const Introduction& introduction);
// True if the rank has proved that it has the same secret of the job, which is not empty.
bool knows_job(const Introduction& theirs, std::string_view job_secret);

Bytes encode(const Introduction& introduction);
// Returns nothing if the bytes are too few. An introduction of another version has only `version`
// set.
std::optional<Introduction> decode_introduction(std::span<const std::byte> bytes);

// Throws MISMATCH (protocol version, num_ranks, a peer that has failed) if rank `peer` cannot be a
// peer of rank `rank`.
void check_peer(int rank, const Introduction& own, int peer, const Introduction& theirs);

// The names that ranks have given their hosts, by rank; nothing where no rank has named its host.
// Throws MISMATCH, the same on all ranks, if some have and others have not.
std::vector<std::string> host_names(std::span<const Introduction> introductions);

// The secret that all ranks of the communicator know, and nobody else does. On several hosts that
// of the job is part of it, since others may listen to the network while the ranks meet.
Secret mesh_secret(std::span<const Introduction> introductions, std::string_view job_secret = {});

struct PeerProcess {
  std::vector<int> ranks;  // ascending
  UniqueFd pidfd;          // readable once the process has ended; empty where the system has none
  bool has_ended = false;  // it was gone already
};

struct PeerProcesses {
  std::vector<PeerProcess> processes;
  std::vector<int> of_rank;  // index into `processes`
  int local_ranks = 0;       // ranks of the calling process, `rank` included
  int shortage = 0;          // errno: a pidfd is missing for want of descriptors here
};

// Groups the ranks by process. Ranks of the calling process are one "process" each: they cannot
// die, only leave. Processes of other hosts have no pidfd.
PeerProcesses find_processes(int rank, std::span<const Introduction> introductions);

}  // namespace xd
