#include "mesh/introduction.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string_view>
#include <vector>

#include "base/error.h"
#include "base/fd.h"
#include "base/rank_list.h"
#include "bootstrap/handshake.h"

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

ProcessIdentity this_process() {
  // The bytes are made once per process; a forked child has the same bytes, and another pid.
  static const auto random = make_random<std::array<unsigned char, 16>>();
  struct stat status;
  if (::stat("/proc/self/ns/pid", &status) != 0) fail_errno("stat /proc/self/ns/pid", errno);
  return {status.st_ino, ::getpid(), random};
}

std::string_view boot_id(const HostIdentity& host) {
  return {host.boot_id.data(), host.boot_id.size()};
}

// Fails on an older kernel, in a sandbox, or for a process whose pid means something else here. The
// process's end is then noticed by its connection alone.
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

Introduction make_introduction(int num_ranks, std::string_view host_name) {
  XD_CHECK(host_name.size() <= kMaxHostBytes);
  HostName name{};
  std::ranges::copy(host_name, name.begin());
  return {.version = kProtocolVersion,
          .num_ranks = num_ranks,
          .host = this_host(),
          .host_name = name,
          .process = this_process(),
          .socket_name = make_random<Tag>(),
          .nonce = make_random<Nonce>(),
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

Bytes encode(const Introduction& introduction) {
  WireWriter out;
  out.put(introduction);
  return out.take();
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
  const std::string_view failure(theirs.failure.data(),
                                 ::strnlen(theirs.failure.data(), theirs.failure.size()));
  if (!failure.empty()) fail(XD_ERROR_MISMATCH, "rank ", peer, " failed: ", failure);
  if (theirs.host.boot_id != own.host.boot_id)
    fail(XD_ERROR_UNSUPPORTED, "ranks ", rank, " and ", peer, " are on different hosts (boot ids ",
         boot_id(own.host), " and ", boot_id(theirs.host),
         "); all ranks of a communicator must be on one");
  if (!(theirs.host == own.host))
    fail(XD_ERROR_UNSUPPORTED, "ranks ", rank, " and ", peer,
         " are in different network namespaces (", own.host.network_namespace, " and ",
         theirs.host.network_namespace, "), perhaps of two containers; they must share one");
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

Secret mesh_secret(std::span<const Introduction> introductions) {
  std::vector<std::string_view> parts{"crossdock mesh"};
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
    if (!(identity == own.process))
      process.pidfd = open_pidfd(own, process, identity, result.shortage);
  }
  return result;
}

}  // namespace xd
