// Setting up the connections of a mesh: each rank calls the lower ones that it is linked to, and is
// called by the higher. Ranks of its own host are called over a Unix socket, others over TCP.
//
// A rank that waits for a call from another host would not notice that the caller is gone. So once
// it has waited for a while it calls that rank itself. Such a connection is a *vigil*: it is proven
// as any other, says nothing but the words of a rank that gives up, and is closed when the awaited
// call has come. A connection without proofs ends nothing: over TCP one that breaks before its
// proofs are there may be of somebody who has only listened to the network.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/descriptor_reserve.h"
#include "base/fd.h"
#include "base/poll_list.h"
#include "base/tcp.h"
#include "base/warning_limit.h"
#include "meet/handshake.h"
#include "meet/link.h"
#include "meet/met_ranks.h"

namespace xd {

// The sockets at which a rank listens.
struct MeshListeners {
  UniqueFd near;    // a Unix socket
  UniqueFd remote;  // TCP, for ranks on other hosts
};

class MeshConnector {
 public:
  // `ranks` outlives the object. `reserve` has a descriptor for each connection, or fewer if the
  // process could not get them in advance. A host that cannot be reached for as long as
  // silence is borne (bounds_of_silence()) ends run(); `silence_ms` <= 0 = only its deadline does.
  MeshConnector(const MetRanks& ranks, MeshListeners listeners, DescriptorReserve reserve = {},
                int silence_ms = 0);

  // One proven connection per linked rank, by rank. Throws TIMEOUT naming the ranks that are
  // missing, PEER_LOST naming one that is gone, MISMATCH. An error is told to the ranks that are
  // connected; for ranks of other hosts that are not, this rank goes on connecting for a moment.
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
    TcpAddress from = {};                    // likewise

    bool is_stranger() const { return rank < 0 && over_tcp; }
  };
  // Places in the list of what is waited for.
  struct Places {
    int near = -1, remote = -1;
    std::vector<int> calls, processes, links, vigils;
  };

  bool connected(int rank) const { return static_cast<bool>(links_[at(rank)]); }
  void connect(const Deadline& deadline);
  std::vector<int> missing() const;
  template <class Open>
  UniqueFd open_one(Open open);
  void dial();
  bool dial_near(int rank);
  bool dial_remote(int rank);
  void answered(Call& call);
  void cannot_reach(int rank, int error);
  void say_farewell() noexcept;
  bool has_untold() const;
  bool is_untold_neighbour(int rank) const;
  void wait(const Deadline& deadline);
  Places list(PollList& items) const;
  void serve_calls(const PollList& items, const std::vector<int>& places);
  Deadline next_look(const Deadline& deadline) const;
  void accept(int listener, bool over_tcp);
  bool send_stranger_away();
  void close_overdue_callers();
  void read(Call& call);
  bool receive(Call& call);
  void advance(Call& call);
  bool send(const Call& call, std::span<const std::byte> bytes) const;
  void establish(Call& call);
  bool may_be(const Call& call, int rank) const;
  void keep_vigil(int rank, MeshLink link);
  void check_route(const Call& call, int rank) const;
  void hung_up(Call& call);
  void fail_or_drop(Call& call, const std::string& reason);
  void warn(const std::string& reason);
  bool is_awaited(const PeerProcess& process) const;
  void check_link(int rank);
  void check_vigil(int rank);
  Packet listen(const MeshLink& link) const;
  [[noreturn]] void fail_ended(const PeerProcess& process) const;
  [[noreturn]] void fail_gone(int rank, bool silent = false) const;

  const MetRanks& ranks_;
  const int rank_;
  MeshListeners listeners_;
  DescriptorReserve reserve_;
  const int silence_ms_, reach_ms_;
  // Other hosts, by rank, if silence_ms_ > 0: from the last time that they have answered on.
  std::vector<Deadline> reach_by_;
  Deadline dial_again_, keep_vigils_, accept_again_;
  std::vector<int> to_dial_;
  std::map<int, Deadline> refused_;  // ranks that refuse calls, and when that is the last word
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<MeshLink> links_;
  std::vector<MeshLink> vigils_;  // by rank: of this rank with higher ones, and of lower ones
  std::vector<bool> closed_;      // links that a peer has closed after saying something
  std::optional<FailureWords> farewell_;  // this rank gives up
  std::vector<bool> deaf_;                // neighbours that have hung up since
  WarningLimit warnings_{"connections refused while the ranks connect"};
};

}  // namespace xd
