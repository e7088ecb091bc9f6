// Connections between all ranks of a communicator on one host, and the thread that watches them.
//
// Every pair of ranks keeps one SOCK_SEQPACKET connection over an abstract Unix socket (it leaves
// no file). Both sides have proved the communicator's secret, and the kernel has vouched for the
// peer's user. Over it travel: small messages with descriptors (all_gather), goodbye, abort.
//
// The watch thread is the only reader. It notices a dead peer by the connection's end and, since a
// forked child may hold that connection open, by a pidfd of the peer's process where the system has
// them. The unit of death is the process: all its ranks are reported together.
#pragma once

#include <sys/types.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "bootstrap/bootstrap.h"
#include "mesh/inbox.h"
#include "mesh/introduction.h"
#include "mesh/packet.h"
#include "mesh/watch.h"

namespace xd {

class Mesh {
 public:
  using Item = MeshItem;  // one message of a rank in an all_gather
  static constexpr std::size_t kMaxBlob = kMaxMeshBlob;

  // Meets the other ranks and connects to each. Collective. Throws TIMEOUT naming missing ranks,
  // MISMATCH (protocol version, num_ranks, hosts named by some, a peer that failed), UNSUPPORTED
  // (ranks on different hosts), SYSTEM. An error of this rank is told to its peers. `host_name`:
  // see xd_comm_config.host; empty = none.
  static std::unique_ptr<Mesh> connect(Bootstrap& bootstrap, const Deadline& deadline,
                                       std::string_view host_name = {});

  struct Parts {
    int rank;
    UniqueFd stop;  // ends the watch thread
    PeerProcesses processes;
    std::vector<std::string> host_names;  // see Mesh::host_names()
    std::vector<UniqueFd> links;          // by rank; never closed or replaced before the mesh ends
  };
  // Takes the parts only once nothing can fail any more.
  explicit Mesh(Parts&& parts);
  ~Mesh();  // says goodbye (unless in a forked child), joins the watch thread
  Mesh(const Mesh&) = delete;
  Mesh& operator=(const Mesh&) = delete;

  // Starts the watch thread; no event comes before that. If it cannot, the peers are told why.
  void start(MeshEvents& events);

  // Collective, in the same order on all ranks (calls of one rank exclude each other). items[r]
  // gets the message of rank r, and items[rank] stays as it is; without any items, messages are
  // dropped. Blobs have at most kMaxBlob bytes; sizes may differ. `fd` = -1: none; it is
  // duplicated, not taken. Throws TIMEOUT naming the missing ranks; PEER_LOST; MISMATCH (a peer has
  // failed); ABORTED; SYSTEM. Any event reported to on_* ends the wait. Allocates only to throw.
  void all_gather(std::span<const std::byte> blob, int fd, const Deadline& deadline,
                  std::span<Item> items);

  // Tells every peer that this rank aborts. Does not block; safe on any thread.
  void send_abort() noexcept;

  // Tells every peer that this rank cannot go on, and why: the exception in flight. Their calls
  // that wait for this rank throw MISMATCH.
  void send_failure() noexcept { tell_failure(parts_.links); }

  // Ends an all_gather that is waiting here (after a fatal error): it throws ABORTED.
  void cancel() noexcept { inbox_.cancel(); }

  // The names that ranks have given their hosts, by rank; empty where none has.
  const std::vector<std::string>& host_names() const { return parts_.host_names; }

  // Ranks of this communicator that live in this process, itself included.
  int local_ranks() const { return parts_.processes.local_ranks; }

 private:
  int num_ranks() const { return static_cast<int>(parts_.links.size()); }
  void watch(MeshEvents& events) noexcept;
  void tell_deafness() noexcept;
  void wait_for_room(int peer, std::uint64_t round, const Deadline& deadline);

  MeshInbox inbox_;
  const pid_t creator_;
  Parts parts_;
  std::optional<MeshWatch> watch_;
  // The reason why the watch thread has ended; deaf_ is set after it.
  std::array<char, kMaxFailureText> deaf_by_{};
  std::atomic<bool> deaf_{false};
  std::thread thread_;
};

}  // namespace xd
