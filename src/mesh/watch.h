// The watch thread's work: reads all connections, notices goodbyes, aborts and deaths.
#pragma once

#include <crossdock/status.h>

#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"
#include "base/poll_list.h"
#include "bootstrap/wire.h"
#include "mesh/inbox.h"
#include "mesh/introduction.h"
#include "mesh/packet.h"

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

class MeshWatch {
 public:
  // All of it must outlive the object. links[r] is none for the own rank.
  struct Sources {
    int rank;
    const std::vector<UniqueFd>& links;
    const PeerProcesses& processes;
    MeshInbox& inbox;
    MeshEvents& events;
  };

  explicit MeshWatch(const Sources& sources);

  // Returns when stop_fd becomes readable. Throws if it cannot go on: no memory for a peer's
  // message, or the system refuses to wait or to receive.
  void run(int stop_fd);

 private:
  enum class State { here, failed, left, lost };  // failed: has said so, and may say more

  void wait_and_serve(int stop_fd);
  int list_sources(int stop_fd);  // the place of stop_fd
  bool drain(int rank);
  bool handle(int rank, Packet packet);
  void lose(int rank);
  bool is_here(int rank) const;
  bool is_heard(int rank) const;  // is here, or has failed and not hung up

  Sources from_;
  std::vector<State> states_;
  std::vector<bool> ended_;    // by process
  std::vector<bool> aborted_;  // by rank
  // What run() works with has room for all from the start: it allocates for messages alone.
  PollList sources_;
  std::vector<int> place_of_rank_, place_of_process_;  // in sources_
  std::vector<int> lost_;
  Bytes buffer_;
  bool stopped_ = false;
};

}  // namespace xd
