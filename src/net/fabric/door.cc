#include "net/fabric/door.h"

#include <dirent.h>
#include <linux/filter.h>
#include <netinet/in.h>

#include <algorithm>
#include <charconv>
#include <cstring>
#include <memory>
#include <optional>
#include <string_view>

namespace xd::net {
namespace {

constexpr std::uint32_t kDrop = 0, kPass = UINT32_MAX;
constexpr std::uint32_t kSourceOf4 = 12, kSourceOf6 = 8;  // bytes into the headers of IP

// Names of endpoints over TCP are socket addresses.
std::optional<TcpAddress> address_in(std::span<const std::byte> name) {
  TcpAddress address;
  if (name.size() < sizeof(sockaddr_in) || name.size() > sizeof(address.storage)) return {};
  std::memcpy(&address.storage, name.data(), name.size());
  const int family = address.storage.ss_family;
  address.size = family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  const bool is_known = family == AF_INET || family == AF_INET6;
  if (!is_known || name.size() < address.size) return {};
  return address;
}

// Bound there and not connected; it may not listen yet.
bool waits_at(int fd, const std::string& place) {
  TcpAddress here, other;
  here.size = other.size = sizeof(here.storage);
  auto* const own = reinterpret_cast<sockaddr*>(&here.storage);
  auto* const peer = reinterpret_cast<sockaddr*>(&other.storage);
  int type = 0;
  socklen_t size = sizeof(type);
  return ::getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &size) == 0 && type == SOCK_STREAM &&
         ::getsockname(fd, own, &here.size) == 0 &&
         (here.storage.ss_family == AF_INET || here.is_ipv6()) && here.text() == place &&
         ::getpeername(fd, peer, &other.size) != 0;
}

struct CloseFolder {
  void operator()(DIR* folder) const { ::closedir(folder); }
};

// The socket of this process at which others call there; -1 = there is none.
int listener_at(const std::string& place) {
  const std::unique_ptr<DIR, CloseFolder> folder(::opendir("/proc/self/fd"));
  if (!folder) return -1;
  while (const dirent* entry = ::readdir(folder.get())) {
    const std::string_view name = entry->d_name;
    int fd = -1;
    const auto read = std::from_chars(name.data(), name.data() + name.size(), fd);
    if (read.ec == std::errc() && waits_at(fd, place)) return fd;
  }
  return -1;
}

sock_filter load(std::uint32_t byte_of_ip) {
  return BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<std::uint32_t>(SKF_NET_OFF) + byte_of_ip);
}
sock_filter skip_unless(std::uint32_t word, std::size_t count) {
  return BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, word, 0, static_cast<std::uint8_t>(count));
}
sock_filter end(std::uint32_t bytes) { return BPF_STMT(BPF_RET | BPF_K, bytes); }

void pass_from_4(const sockaddr_in& host, std::vector<sock_filter>& program) {
  program.push_back(load(kSourceOf4));
  program.push_back(skip_unless(ntohl(host.sin_addr.s_addr), 1));
  program.push_back(end(kPass));
}

void pass_from_6(const sockaddr_in6& host, std::vector<sock_filter>& program) {
  for (std::size_t word = 0; word < 4; ++word) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, host.sin6_addr.s6_addr + 4 * word, sizeof(bits));
    program.push_back(load(kSourceOf6 + static_cast<std::uint32_t>(4 * word)));
    program.push_back(skip_unless(ntohl(bits), 2 * (3 - word) + 1));
  }
  program.push_back(end(kPass));
}

std::vector<sock_filter> program_for(std::span<const TcpAddress> hosts) {
  std::vector<sock_filter> program;
  for (const TcpAddress& host : hosts) {
    const auto* const address = &host.storage;
    if (host.is_ipv6())
      pass_from_6(*reinterpret_cast<const sockaddr_in6*>(address), program);
    else
      pass_from_4(*reinterpret_cast<const sockaddr_in*>(address), program);
  }
  program.push_back(end(kDrop));
  return program;
}

bool attach(int socket, std::span<const TcpAddress> hosts) {
  std::vector<sock_filter> program = program_for(hosts);
  if (program.size() > BPF_MAXINSNS) return false;
  const sock_fprog filter{.len = static_cast<unsigned short>(program.size()),
                          .filter = program.data()};
  return ::setsockopt(socket, SOL_SOCKET, SO_ATTACH_FILTER, &filter, sizeof(filter)) == 0;
}

}  // namespace

Door::Door(std::span<const std::byte> name) {
  const auto address = address_in(name);
  const int socket = address ? listener_at(address->text()) : -1;
  if (socket >= 0 && attach(socket, {})) socket_ = socket;
}

// Where there are more hosts than a filter has room for (450 at least, if the system's
// net.core.optmem_max allows it), others are admitted with them.
void Door::admit(std::span<const std::byte> name) {
  const auto address = address_in(name);
  if (!is_there() || !address) return;
  const std::string host = address->host();
  if (std::ranges::find(admitted_, host, &TcpAddress::host) != admitted_.end()) return;
  admitted_.push_back(*address);
  const int none = 0;
  if (!attach(socket_, admitted_))
    ::setsockopt(socket_, SOL_SOCKET, SO_DETACH_FILTER, &none, sizeof(none));
}

void Door::shut() {
  admitted_.clear();
  if (is_there()) attach(socket_, admitted_);
}

}  // namespace xd::net
