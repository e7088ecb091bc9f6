// The address at which ranks on other hosts reach this one.
#pragma once

#include <span>
#include <string>
#include <string_view>

#include "base/interfaces.h"
#include "base/tcp.h"

namespace xd {

// The caller's choice: an interface, or one of this host's addresses; empty = none. `source` names
// where it comes from.
struct InterfaceWish {
  std::string_view text;
  std::string_view source;
};

// The config's `net_interface` where it is given, else XD_NET_IFACE.
InterfaceWish interface_wish(const char* of_config);

// Takes what the caller has chosen; else the address by which this rank reaches the meeting point,
// `towards_meeting`, since other hosts reach that, too; else, with nullptr, this host's only
// address that other hosts could reach. It prefers IPv4 where it has the choice. A host name is
// never asked. Throws INVALID_ARGUMENT with the addresses that there are.
TcpAddress choose_address(std::span<const InterfaceAddress> of_host, const InterfaceWish& wish,
                          const TcpAddress* towards_meeting);

}  // namespace xd
