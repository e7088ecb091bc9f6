#include "meet/control_address.h"

#include <algorithm>
#include <vector>

#include "base/env.h"
#include "base/error.h"

namespace xd {
namespace {

// The first of IPv4, else the first.
TcpAddress preferred(const std::vector<InterfaceAddress>& addresses) {
  const auto four =
      std::ranges::find_if(addresses, [](const auto& a) { return !a.address.is_ipv6(); });
  return (four != addresses.end() ? *four : addresses.front()).address;
}

TcpAddress wished(std::span<const InterfaceAddress> of_host, const InterfaceWish& wish,
                  const TcpAddress* towards_meeting) {
  const std::string text(wish.text);
  const auto number = numeric_address(text);
  std::vector<InterfaceAddress> fitting;
  for (const InterfaceAddress& item : of_host) {
    if (item.address.is_link_local()) continue;
    const bool meant = item.interface == text || (number && item.address.host() == number->host());
    if (meant) fitting.push_back(item);
  }
  XD_REQUIRE(!fitting.empty(), wish.source, " = ", text, ", expected an interface or address of ",
             "this host that other hosts can reach: ", to_string(of_host));
  // Ranks must all choose the same family, and the meeting's is one that they share.
  if (towards_meeting != nullptr) {
    const auto same = std::ranges::find_if(fitting, [&](const auto& item) {
      return item.address.is_ipv6() == towards_meeting->is_ipv6();
    });
    if (same != fitting.end()) return same->address;
  }
  return preferred(fitting);
}

TcpAddress only_one(std::span<const InterfaceAddress> of_host) {
  std::vector<InterfaceAddress> reachable;
  std::ptrdiff_t fours = 0;
  for (const InterfaceAddress& item : of_host) {
    if (item.address.is_loopback() || item.address.is_link_local()) continue;
    reachable.push_back(item);
    fours += item.address.is_ipv6() ? 0 : 1;
  }
  const bool one = fours == 1 || (fours == 0 && reachable.size() == 1);
  XD_REQUIRE(one, "config.net_interface = NULL, and this host has ",
             reachable.empty() ? "no address" : "several addresses",
             " that other hosts could reach (", to_string(reachable),
             "), expected one: name the interface, there or in XD_NET_IFACE");
  return preferred(reachable);
}

}  // namespace

InterfaceWish interface_wish(const char* of_config) {
  if (of_config != nullptr) return {of_config, "config.net_interface"};
  return {env().net_interface, "XD_NET_IFACE"};
}

TcpAddress choose_address(std::span<const InterfaceAddress> of_host, const InterfaceWish& wish,
                          const TcpAddress* towards_meeting) {
  if (!wish.text.empty()) return wished(of_host, wish, towards_meeting);
  if (towards_meeting == nullptr) return only_one(of_host);
  XD_REQUIRE(!towards_meeting->is_link_local(), "the meeting point is reached from ",
             towards_meeting->host(), ", which is a link-local address, expected one that means ",
             "the same everywhere: meet at another, or name the interface in ",
             "config.net_interface or XD_NET_IFACE");
  return *towards_meeting;
}

}  // namespace xd
