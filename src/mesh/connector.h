// Setting up the connections of a mesh: each rank calls the lower ones that it is linked to, and is
// called by the higher. Ranks of its own host are called over a Unix socket, others over TCP.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor_reserve.h"
#include "base/fd.h"
#include "base/warning_limit.h"
#include "bootstrap/handshake.h"
#include "mesh/link.h"
#include "mesh/met_ranks.h"

namespace xd {

// What a rank listens with.
struct MeshListeners {
  UniqueFd near;  // a Unix socket
  UniqueFd far;   // TCP, for ranks on other hosts
};

class MeshConnector {
 public:
  // `ranks` outlives the object. `reserve` has a descriptor for each connection, or fewer if the
  // process could not get them in advance. A host that cannot be reached for `silence_ms` ends
  // run(); <= 0 = only its deadline does.
  MeshConnector(const MetRanks& ranks, MeshListeners listeners, DescriptorReserve reserve = {},
                int silence_ms = 0);

  // One proven connection per linked rank, by rank. Throws TIMEOUT naming the ranks that are
  // missing, PEER_LOST naming one that is gone, MISMATCH; an error of this rank alone is told to
  // the ranks that are connected.
  std::vector<MeshLink> run(const Deadline& deadline);

  // Called instead of run(), or when run() has failed: calls the ranks that wait for a call and
  // hangs up, so that they do not wait any longer. Best effort.
  void give_up() noexcept;

 private:
  // A connection whose handshake is under way.
  struct Call {
    UniqueFd fd;
    Handshake handshake;
    int rank;  // the rank that was called; -1 = a caller that has yet to name its rank
    bool over_tcp = false;
    bool is_connecting = false;              // called over TCP, and not answered yet
    Deadline limit = Deadline::after_ms(0);  // of a caller over TCP
  };

  bool connected(int rank) const { return static_cast<bool>(links_[at(rank)]); }
  void connect(const Deadline& deadline);
  std::vector<int> missing() const;
  void open_one();
  void dial();
  bool dial_near(int rank);
  bool dial_far(int rank);
  void answered(Call& call);
  void cannot_reach(int rank, int error);
  void hang_up_on(std::span<const int> ranks) const;
  void wait(const Deadline& deadline);
  Deadline next_look(const Deadline& deadline) const;
  void accept(int listener, bool over_tcp);
  bool send_stranger_away();
  void close_overdue_callers();
  void read(Call& call);
  bool receive(Call& call);
  void advance(Call& call);
  bool send(const Call& call, std::span<const std::byte> bytes) const;
  void establish(Call& call);
  void check_route(const Call& call, int rank) const;
  void hung_up(Call& call);
  void fail_or_drop(Call& call, const std::string& reason);
  void warn(const std::string& reason);
  bool is_awaited(const PeerProcess& process) const;
  void check_link(int rank);
  [[noreturn]] void fail_with_words_of(int rank);
  [[noreturn]] void fail_gone(int rank) const;

  const MetRanks& ranks_;
  const int rank_;
  MeshListeners listeners_;
  DescriptorReserve reserve_;
  const int silence_ms_;
  // Other hosts, by rank, if silence_ms_ > 0: from the last time that they have answered on.
  std::vector<Deadline> reach_by_;
  Deadline dial_again_;
  std::vector<int> to_dial_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<MeshLink> links_;
  std::vector<bool> closed_;  // links that a peer has closed after saying something
  WarningLimit warnings_{"connections refused while the ranks connect"};
};

}  // namespace xd
