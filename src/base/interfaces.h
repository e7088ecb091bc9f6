// The network interfaces of this host.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "base/tcp.h"

namespace xd {

// One address of an interface that is up; an interface with several has as many entries.
struct InterfaceAddress {
  std::string interface;
  TcpAddress address;
};

// Throws SYSTEM.
std::vector<InterfaceAddress> interface_addresses();

// For error texts: "eth0 10.0.0.1, eth0 fd00::1".
std::string to_string(std::span<const InterfaceAddress> addresses);

}  // namespace xd
