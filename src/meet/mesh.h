// Connections between the ranks of a communicator, and the thread that watches them.
//
// Every pair of ranks on one host keeps one SOCK_SEQPACKET connection over an abstract Unix socket
// (it leaves no file). Both sides have proved the communicator's secret, and the kernel has vouched
// for the peer's user. Over it travel: small messages with descriptors (all_gather), goodbye,
// abort. Ranks on different hosts keep TCP connections along rails (meet/rails.h), and pass on to
// their host what they hear there.
//
// The watch thread is the only reader. It notices a dead peer by the connection's end and, since a
// forked child may hold that connection open, by a pidfd of the peer's process where the system has
// them. The unit of death is the process: all its ranks are reported together. A TCP connection is
// also ended by the system when the other host has been silent for too long; then all ranks of that
// host are lost.
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
#include "base/math.h"
#include "meet/bootstrap.h"
#include "meet/control_address.h"
#include "meet/inbox.h"
#include "meet/link.h"
#include "meet/met_ranks.h"
#include "meet/watch.h"

namespace xd {

struct MeshOptions {
  std::string_view host_name;   // see xd_comm_config.host; empty = none
  InterfaceWish net_interface;  // see xd_comm_config
  int silence_ms = 0;           // likewise, resolved; <= 0 = none
  std::string_view job_secret;
  std::uint32_t part_of_host = 0;              // see HostIdentity
  const std::int32_t* global_ranks = nullptr;  // see xd_comm_config
};

class Mesh {
 public:
  using Item = MeshItem;  // one message of a rank in an all_gather
  static constexpr std::size_t kMaxBlob = kMaxMeshBlob;

  // Meets the other ranks and connects to each. Collective. Throws TIMEOUT naming missing ranks,
  // MISMATCH (protocol version, num_ranks, hosts named by some, a peer that failed), SYSTEM; with
  // several machines also INVALID_ARGUMENT (no secret of the job, no address). An error of this
  // rank is told to its peers.
  static std::unique_ptr<Mesh> connect(Bootstrap& bootstrap, const Deadline& deadline,
                                       const MeshOptions& options = {});

  struct Parts {
    UniqueFd wake;  // an eventfd that calls the watch thread
    std::unique_ptr<const MetRanks> ranks;
    std::vector<MeshLink> links;  // by rank; never closed or replaced before the mesh ends
    int silence_ms;
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
  // duplicated, not taken, and only ranks of this host get it. Throws TIMEOUT naming the missing
  // ranks; PEER_LOST; MISMATCH (a peer has failed); ABORTED; SYSTEM. Any event reported to on_*
  // ends the wait, and so does what `look` throws: see MeshInbox. Allocates only to throw.
  using Look = MeshInbox::Look;
  void all_gather(std::span<const std::byte> blob, int fd, const Deadline& deadline,
                  std::span<Item> items, const Look& look = {});
  // How many all_gather this rank has begun.
  std::uint64_t rounds_begun() { return inbox_.rounds_begun(); }

  // Tells every peer that this rank aborts. Does not block; safe on any thread.
  void send_abort() noexcept;

  // Gives ranks on other hosts at most kMaxReport bytes for their MeshEvents::on_report(). Does not
  // block; safe on any thread.
  void send_report(std::span<const std::byte> report) noexcept;
  // Likewise for one rank that this rank is connected to, also a near one. False = there is no room
  // at the moment, or no connection. Where a relay has not passed it on yet, a later report of this
  // rank takes its place if size and first 8 bytes are the same.
  bool send_report_to(int rank, std::span<const std::byte> report) noexcept;
  // On another host, and connected to this rank.
  bool is_rail(int rank) const { return parts_.links[at(rank)].is_tcp(); }

  // Tells every peer that this rank cannot go on, and why: the exception in flight. Their calls
  // that wait for this rank throw MISMATCH.
  void send_failure() noexcept;

  // Ends an all_gather that is waiting here (after a fatal error): it throws ABORTED.
  void cancel() noexcept { inbox_.cancel(); }

  // The names that ranks have given their hosts, by rank; empty where none has.
  const std::vector<std::string>& host_names() const { return ranks().host_names; }

  // The numeric address at which ranks on other hosts reach this rank; with several hosts only.
  std::string own_address() const;

  // Ranks of this communicator that live in this process, itself included.
  int local_ranks() const { return ranks().processes.local_ranks; }
  const Rails& rails() const { return ranks().rails; }
  const RankNames& names() const { return ranks().names; }
  // The secret of the connections.
  const Secret& secret() const { return ranks().secret; }
  // The process of a rank as it was when the ranks met.
  const PeerProcess& process_of(int rank) const {
    return ranks().processes.processes[at(ranks().processes.of_rank[at(rank)])];
  }

 private:
  const MetRanks& ranks() const { return *parts_.ranks; }
  int rank() const { return ranks().rank(); }
  int num_ranks() const { return ranks().num_ranks(); }
  void call_watch() noexcept;
  void look_after_unsent() noexcept;
  void watch(MeshEvents& events) noexcept;
  void tell_deafness() noexcept;
  void wait_for_room(int peer, std::uint64_t round, const Deadline& deadline);

  MeshInbox inbox_;
  const pid_t creator_;
  Parts parts_;
  std::optional<MeshWatch> watch_;
  std::atomic<bool> leaving_{false};
  // The reason why the watch thread has ended; deaf_ is set after it.
  std::optional<FailureWords> deaf_by_;
  std::atomic<bool> deaf_{false};
  std::thread thread_;
};

}  // namespace xd
