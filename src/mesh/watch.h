// The watch thread's work: reads all connections, notices goodbyes, aborts and deaths.
#pragma once

#include <crossdock/status.h>

#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/poll_list.h"
#include "base/wire.h"
#include "mesh/inbox.h"
#include "mesh/introduction.h"
#include "mesh/packet.h"

namespace xd {

// The reports of the watch thread. They are called on that thread, one at a time, and must neither
// block nor call the mesh, except that on_tick() may send_abort() and cancel(). The object outlives
// the mesh.
class MeshEvents {
 public:
  virtual ~MeshEvents() = default;
  virtual void on_lost(
      std::span<const int> ranks) = 0;  // ascending; ranks of processes that ended without goodbye
  virtual void on_left(int rank) = 0;   // the rank said goodbye
  virtual void on_abort(int rank) = 0;  // the rank called abort
  // The watch thread cannot go on, and reports nothing from now on. This call must not allocate,
  // and may also send_abort() and cancel().
  virtual void on_end(xd_status status, int error_number) noexcept = 0;
  // on_tick() is called at least every tick_ms(); -1 = never.
  virtual int tick_ms() const { return -1; }
  virtual void on_tick() {}
};

class MeshWatch {
 public:
  // All of these must outlive the object. links[r] is empty for the own rank.
  struct Sources {
    int rank;
    const std::vector<UniqueFd>& links;
    const PeerProcesses& processes;
    MeshInbox& inbox;
    MeshEvents& events;
  };

  explicit MeshWatch(const Sources& sources);

  // Returns when stop_fd becomes readable. Throws if the thread cannot go on: there is no memory
  // for a peer's message, or the system refuses to wait or to receive.
  void run(int stop_fd);

 private:
  enum class State { here, failed, left, lost };  // failed: the rank has said so, and may say more

  void wait_and_serve(int stop_fd);
  int list_sources(int stop_fd);  // returns the place of stop_fd
  bool drain(int rank);
  bool handle(int rank, Packet packet);
  void lose(int rank);
  bool is_here(int rank) const;
  bool is_heard(int rank) const;  // the rank is here, or has failed and not hung up

  Sources from_;
  std::vector<State> states_;
  std::vector<bool> ended_;    // by process
  std::vector<bool> aborted_;  // by rank
  // The members of run() have room for all sources from the start, so that it allocates for
  // messages alone.
  PollList sources_;
  std::vector<int> place_of_rank_, place_of_process_;  // places in sources_
  std::vector<int> lost_;
  Bytes buffer_;
  bool stopped_ = false;
};

}  // namespace xd
