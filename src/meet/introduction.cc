#include "meet/introduction.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/pidfd.h"
#include "base/rank_list.h"
#include "meet/handshake.h"

namespace xd {
namespace {

HostIdentity this_host() {
  HostIdentity host{};
  const char* const boot_id = "/proc/sys/kernel/random/boot_id";
  const UniqueFd fd(::open(boot_id, O_RDONLY | O_CLOEXEC));
  if (!fd || ::read(fd.get(), host.boot_id.data(), host.boot_id.size()) !=
                 static_cast<ssize_t>(host.boot_id.size()))
    fail_errno(concat("read ", boot_id), errno);
  struct stat status;
  if (::stat("/proc/self/ns/net", &status) != 0) fail_errno("stat /proc/self/ns/net", errno);
  host.network_namespace = status.st_ino;
  return host;
}

HostName this_node() {
  utsname names{};
  ::uname(&names);
  HostName result{};
  const std::string_view name(names.nodename);
  std::ranges::copy(name.substr(0, result.size() - 1), result.begin());
  return result;
}

Secret secret_of_job(std::string_view job_secret) {
  const std::array<std::string_view, 2> parts{"crossdock job", job_secret};
  return derive_secret(parts);
}

// Each proof is of a nonce of its own, so nobody can show another rank's as his.
Proof prove_job(std::string_view job_secret, const Nonce& nonce) {
  return job_secret.empty() ? Proof{}
                            : prove(secret_of_job(job_secret), std::as_bytes(std::span(nonce)));
}

// Fails on an older kernel, in a sandbox, or for a process whose pid means something else here. The
// process's end is then noticed by its connection alone.
void watch(PeerProcess& process, const Introduction& own, const ProcessIdentity& identity,
           int& shortage) {
  if (identity.pid_namespace != own.process.pid_namespace) return;
  process.pidfd = open_pidfd(static_cast<pid_t>(identity.pid));
  if (process.pidfd) return;
  // Should the pid have been given to another process meanwhile, the peer's connection will fail.
  process.has_ended = errno == ESRCH;
  if (errno == EMFILE || errno == ENFILE) shortage = errno;
}

}  // namespace

ProcessIdentity this_process() {
  // The bytes are made once per process; a forked child has the same bytes, and another pid.
  static const auto random = make_random<std::array<unsigned char, 16>>();
  struct stat status;
  if (::stat("/proc/self/ns/pid", &status) != 0) fail_errno("stat /proc/self/ns/pid", errno);
  return {status.st_ino, ::getpid(), random};
}

Introduction make_introduction(int num_ranks, std::string_view host_name,
                               std::string_view job_secret) {
  XD_CHECK(host_name.size() <= kMaxHostBytes);
  HostName name{};
  std::ranges::copy(host_name, name.begin());
  const Nonce nonce = make_random<Nonce>();
  return {.version = kProtocolVersion,
          .num_ranks = num_ranks,
          .host = this_host(),
          .host_name = name,
          .node_name = this_node(),
          .process = this_process(),
          .socket_name = make_random<Tag>(),
          .nonce = nonce,
          .job_proof = prove_job(job_secret, nonce),
          .address = {},
          .failure_is_of_address = 0,
          .failure = {}};
}

Introduction introduce_failure(int num_ranks) noexcept {
  Introduction result{};
  result.version = kProtocolVersion;
  result.num_ranks = num_ranks;
  caught(result.failure);
  if (result.failure[0] == '\0') result.failure[0] = '?';  // an empty text would mean no failure
  return result;
}

void introduce_no_address(Introduction& introduction) noexcept {
  introduction.address = {};
  introduction.failure_is_of_address = 1;
  caught(introduction.failure);
}

Bytes encode(const Introduction& introduction) {
  WireWriter out;
  out.put(introduction);
  return out.take();
}

std::string_view failure_of(const Introduction& introduction) {
  return {introduction.failure.data(),
          ::strnlen(introduction.failure.data(), introduction.failure.size())};
}

bool knows_job(const Introduction& theirs, std::string_view job_secret) {
  return proof_holds(secret_of_job(job_secret), std::as_bytes(std::span(theirs.nonce)),
                     theirs.job_proof);
}

std::optional<Introduction> decode_introduction(std::span<const std::byte> bytes) {
  Introduction result{};
  result.version = WireReader(bytes).take<std::uint32_t>();
  if (result.version != kProtocolVersion && bytes.size() >= sizeof(result.version)) return result;
  WireReader in(bytes);
  result = in.take<Introduction>();
  if (!in.at_end()) return std::nullopt;
  return result;
}

void check_peer(int rank, const Introduction& own, int peer, const Introduction& theirs) {
  if (theirs.version != own.version)
    fail(XD_ERROR_MISMATCH, "rank ", peer, " speaks protocol version ", theirs.version,
         ", expected ", own.version, " as rank ", rank, " does");
  if (theirs.num_ranks != own.num_ranks)
    fail(XD_ERROR_MISMATCH, "rank ", peer, " has num_ranks = ", theirs.num_ranks, ", expected ",
         own.num_ranks, " as rank ", rank, " has");
  const std::string_view failure = failure_of(theirs);
  if (!failure.empty() && theirs.failure_is_of_address == 0)
    fail(XD_ERROR_MISMATCH, "rank ", peer, " failed: ", failure);
}

std::vector<std::string> host_names(std::span<const Introduction> introductions) {
  std::vector<std::string> names;
  std::vector<int> with, without;
  for (const Introduction& introduction : introductions) {
    const HostName& name = introduction.host_name;
    names.emplace_back(name.data(), ::strnlen(name.data(), name.size()));
    (names.back().empty() ? without : with).push_back(static_cast<int>(names.size()) - 1);
  }
  if (with.empty()) return {};
  if (!without.empty())
    fail(XD_ERROR_MISMATCH, "config.host = '", names[static_cast<std::size_t>(with[0])],
         "' on rank ", with[0], " and not given on ", rank_list(without),
         ", expected that all ranks name their hosts, or none");
  return names;
}

Secret mesh_secret(std::span<const Introduction> introductions, std::string_view job_secret) {
  std::vector<std::string_view> parts{"crossdock mesh"};
  if (!job_secret.empty()) parts.push_back(job_secret);
  for (const Introduction& introduction : introductions)
    parts.emplace_back(reinterpret_cast<const char*>(introduction.nonce.data()),
                       introduction.nonce.size());
  return derive_secret(parts);
}

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
    const bool is_here = introductions[static_cast<std::size_t>(process.ranks[0])].host == own.host;
    if (is_here && !(identity == own.process)) watch(process, own, identity, result.shortage);
  }
  return result;
}

}  // namespace xd
