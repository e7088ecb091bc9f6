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

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"
#include "bootstrap/bootstrap.h"

namespace xd {

// What the watch thread reports. Called on that thread, one at a time; must not block and must not
// call the mesh, but for on_tick(), which may send_abort() and cancel(). Outlives the mesh.
class MeshEvents {
 public:
  virtual ~MeshEvents() = default;
  virtual void on_lost(
      std::span<const int> ranks) = 0;  // ascending; processes that ended without goodbye
  virtual void on_left(int rank) = 0;   // said goodbye
  virtual void on_abort(int rank) = 0;  // called abort
  // The watch thread cannot go on: nothing is reported from now on. What happens here allocates
  // nothing, and may also send_abort() and cancel().
  virtual void on_end(xd_status status, int error_number) noexcept = 0;
  // on_tick() comes at least that often; -1 = never.
  virtual int tick_ms() const { return -1; }
  virtual void on_tick() {}
};

class Mesh {
 public:
  // One message of a rank in an all_gather.
  struct Item {
    Bytes blob;
    UniqueFd fd;                // empty if the rank sent none
    bool fd_discarded = false;  // it sent one, for which this process had no room
  };

  // Meets the other ranks and connects to each. Collective. Throws TIMEOUT naming missing ranks,
  // MISMATCH (protocol version, num_ranks, a peer that failed), UNSUPPORTED (ranks on different
  // hosts), SYSTEM. What this rank fails of is told to its peers.
  static std::unique_ptr<Mesh> connect(Bootstrap& bootstrap, const Deadline& deadline);
  virtual ~Mesh() = default;  // says goodbye (unless in a forked child), joins the watch thread

  // Starts the watch thread; no event comes before that. If it cannot, the peers are told why.
  virtual void start(MeshEvents& events) = 0;

  // Collective, in the same order on all ranks (calls of one rank exclude each other). items[r]
  // gets what rank r sent, items[rank] stays as it is; without any items, what comes is dropped.
  // Blobs at most kMaxBlob bytes; sizes may differ. `fd` = -1: none; it is duplicated, not taken.
  // Throws TIMEOUT naming the missing ranks; PEER_LOST; MISMATCH (a peer has failed); ABORTED;
  // SYSTEM; whatever on_* reported while it waited ends the wait. Allocates only to throw.
  virtual void all_gather(std::span<const std::byte> blob, int fd, const Deadline& deadline,
                          std::span<Item> items) = 0;

  // Tells every peer that this rank aborts. Does not block; safe on any thread.
  virtual void send_abort() noexcept = 0;

  // Tells every peer that this rank cannot go on, and why: the exception in flight. Theirs that
  // wait for it throw MISMATCH.
  virtual void send_failure() noexcept = 0;

  // Ends an all_gather that is waiting here (after a fatal error): it throws ABORTED.
  virtual void cancel() noexcept = 0;

  // Ranks of this communicator that live in this process, itself included.
  virtual int local_ranks() const = 0;

  static constexpr std::size_t kMaxBlob = 32768;
};

}  // namespace xd
