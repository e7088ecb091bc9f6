// What the watch thread has received from the peers and learned about them; where all_gather waits.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <mutex>
#include <optional>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "comm/mesh.h"

namespace xd {

class MeshInbox {
 public:
  MeshInbox(int rank, int num_ranks);

  // ---- The watch thread ----

  // False = `round` is not one that the peer can be at. A peer is at most one round ahead: to
  // finish a round it needs this rank's message, which is sent after begin_round().
  bool deliver(int rank, std::uint64_t round, Mesh::Item item);
  void mark_lost(std::span<const int> ranks);
  void mark_left(int rank);
  void mark_aborted(int rank);

  // ---- Callers of the mesh ----

  std::uint64_t begin_round();
  // Waits for what every peer sent in `round`; result[own rank] is empty. Throws TIMEOUT,
  // PEER_LOST or ABORTED.
  std::vector<Mesh::Item> wait_for(std::uint64_t round, const Deadline& deadline);
  // Throws PEER_LOST or ABORTED if the round cannot be completed any more.
  void check(std::uint64_t round);
  void cancel();

 private:
  struct Letter {
    std::uint64_t round;
    Mesh::Item item;
  };
  struct Peer {
    std::deque<Letter> letters;
    std::uint64_t rounds_received = 0;
    bool lost = false;
    bool left = false;
  };

  bool has_letter(const Peer& peer, std::uint64_t round) const;
  std::vector<int> missing(std::uint64_t round) const;
  void check_locked(std::uint64_t round) const;

  const int rank_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<Peer> peers_;
  std::uint64_t rounds_begun_ = 0;
  std::optional<int> aborted_by_;
  bool cancelled_ = false;
};

}  // namespace xd
