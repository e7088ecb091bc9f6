// What a rank says about itself through the bootstrap, so that the others can connect to it.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>

#include "bootstrap/secret.h"
#include "bootstrap/wire.h"

namespace xd {

// Processes that agree on this can pass each other descriptors over an abstract Unix socket: the
// same running kernel, the same network namespace. A host name would say neither.
struct HostIdentity {
  std::array<char, 36> boot_id;
  std::array<char, 4> unused;
  std::uint64_t network_namespace;
  bool operator==(const HostIdentity&) const = default;
};

// The pid alone would be the same in two containers, the random bytes alone in a forked child.
struct ProcessIdentity {
  std::uint64_t pid_namespace;
  std::int64_t pid;
  std::array<unsigned char, 16> random;
  bool operator==(const ProcessIdentity&) const = default;
};

struct Introduction {
  std::uint32_t version;
  std::int32_t num_ranks;
  HostIdentity host;
  ProcessIdentity process;
  Tag socket_name;  // random
  Nonce nonce;      // this rank's share of the secret of the communicator
  // Why this rank cannot take part; empty if it can. Then all but the first two may be missing.
  std::array<char, 512> failure;
};

// Of the calling process, with a new socket name and nonce.
Introduction make_introduction(int num_ranks);
// Of a rank that comes to say that it has failed: the exception in flight is the reason.
Introduction introduce_failure(int num_ranks) noexcept;

Bytes encode(const Introduction& introduction);
// Empty if the bytes are too few to be one; those of another version have only `version` set.
std::optional<Introduction> decode_introduction(std::span<const std::byte> bytes);

// Throws MISMATCH (protocol version, num_ranks, a peer that has failed) or UNSUPPORTED (different
// hosts) if rank `peer` cannot be a peer of rank `rank`.
void check_peer(int rank, const Introduction& own, int peer, const Introduction& theirs);

// What all ranks of the communicator know, and nobody else.
Secret mesh_secret(std::span<const Introduction> introductions);

}  // namespace xd
