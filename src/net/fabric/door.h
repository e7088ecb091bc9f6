// A door in front of an endpoint of libfabric that stands on TCP. Its providers take connections
// from anybody, and trust what comes over them: a stranger could fill their memory, or end the
// process by a damaged message. So the kernel is told, by a filter on the socket at which libfabric
// listens, to drop what comes from other hosts than those of peers, and everything once all peers
// have connected. This needs no privilege.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include "base/tcp.h"

namespace xd::net {

class Door {
 public:
  Door() = default;  // there is none
  // Shuts the door of the endpoint with this name, as fi_getname() gives it. Where no socket of
  // this process is for it, or the system takes no filter, there is none, and nothing is done.
  explicit Door(std::span<const std::byte> name);

  bool is_there() const { return socket_ >= 0; }
  // The host of the peer with this name may connect from now on, besides those before.
  void admit(std::span<const std::byte> name);
  // Nobody may. Connections that are there stay.
  void shut();

 private:
  int socket_ = -1;  // libfabric's
  std::vector<TcpAddress> admitted_;
};

}  // namespace xd::net
