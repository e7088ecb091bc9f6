// The watch thread's work: reads all connections, notices goodbyes, aborts and deaths.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/fd.h"
#include "bootstrap/wire.h"
#include "comm/mesh.h"
#include "comm/mesh_inbox.h"
#include "comm/mesh_message.h"
#include "comm/mesh_peers.h"
#include "comm/mesh_socket.h"

namespace xd {

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

  // Returns when stop_fd becomes readable, or with one log line if the system refuses to wait.
  void run(int stop_fd) noexcept;

 private:
  enum class State { here, left, lost };

  void wait_and_serve(int stop_fd);
  bool drain(int rank);
  bool handle(int rank, Packet packet);
  void lose(int rank);
  bool is_here(int rank) const;

  Sources from_;
  std::vector<State> states_;
  std::vector<bool> ended_;    // by process
  std::vector<bool> aborted_;  // by rank
  Bytes buffer_;
  bool stopped_ = false;
};

}  // namespace xd
