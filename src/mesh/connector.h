// Setting up the connections of a mesh: each rank calls the lower ones and is called by the higher.
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
#include "mesh/introduction.h"

namespace xd {

class MeshConnector {
 public:
  // `reserve` has a descriptor for each connection, or fewer if the process could not get them in
  // advance.
  MeshConnector(int rank, std::span<const Introduction> introductions,
                const PeerProcesses& processes, UniqueFd listener, DescriptorReserve reserve = {});

  // One proven connection per rank, none for this one. Throws TIMEOUT naming the ranks that are
  // missing, PEER_LOST naming one that is gone, MISMATCH; an error of this rank alone is told to
  // the ranks that are connected.
  std::vector<UniqueFd> run(const Deadline& deadline);

  // Called instead of run(), or when run() has failed: calls the ranks that wait for a call and
  // hangs up, so that they do not wait any longer. Best effort.
  void give_up() noexcept;

 private:
  // A connection whose handshake is under way.
  struct Call {
    UniqueFd fd;
    Handshake handshake;
    int rank;  // the rank that was called; -1 = a caller that has yet to name its rank
  };

  bool connected(int rank) const {
    return static_cast<bool>(links_[static_cast<std::size_t>(rank)]);
  }
  void connect(const Deadline& deadline);
  std::vector<int> missing() const;
  void open_one();
  void dial();
  void wait(const Deadline& deadline);
  void accept();
  void advance(Call& call);
  void read(Call& call);
  void establish(Call& call);
  void hung_up(Call& call);
  void fail_or_drop(Call& call, const std::string& reason);
  void warn(const std::string& reason);
  bool is_awaited(const PeerProcess& process) const;
  void check_link(int rank);

  int rank_;
  std::span<const Introduction> introductions_;
  const PeerProcesses& processes_;
  Secret secret_;
  UniqueFd listener_;
  DescriptorReserve reserve_;
  std::vector<int> to_dial_;
  std::vector<std::unique_ptr<Call>> calls_;
  std::vector<UniqueFd> links_;
  std::vector<bool> closed_;  // links that a peer has closed after saying something
  WarningLimit warnings_{"connections refused while the ranks connect"};
};

}  // namespace xd
