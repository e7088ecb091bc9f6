#include "base/interfaces.h"

#include <ifaddrs.h>
#include <net/if.h>

#include <cerrno>
#include <memory>

#include "base/error.h"

namespace xd {

std::vector<InterfaceAddress> interface_addresses() {
  ifaddrs* list = nullptr;
  if (::getifaddrs(&list) != 0) fail_errno("getifaddrs", errno);
  const std::unique_ptr<ifaddrs, decltype(&::freeifaddrs)> owner(list, &::freeifaddrs);
  std::vector<InterfaceAddress> found;
  for (const ifaddrs* item = list; item != nullptr; item = item->ifa_next) {
    if (item->ifa_addr == nullptr || (item->ifa_flags & IFF_UP) == 0) continue;
    const int family = item->ifa_addr->sa_family;
    if (family != AF_INET && family != AF_INET6) continue;
    found.push_back({item->ifa_name, from_sockaddr(*item->ifa_addr)});
  }
  return found;
}

std::string to_string(std::span<const InterfaceAddress> addresses) {
  std::string text;
  for (const InterfaceAddress& item : addresses)
    text += concat(text.empty() ? "" : ", ", item.interface, " ", item.address.host());
  return text.empty() ? "none" : text;
}

}  // namespace xd
