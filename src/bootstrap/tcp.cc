#include "bootstrap/tcp.h"

#include <netdb.h>
#include <netinet/in.h>
#include <poll.h>

#include <cerrno>
#include <cstring>
#include <memory>

#include "base/error.h"

namespace xd {
namespace {

sockaddr* as_sockaddr(sockaddr_storage& storage) { return reinterpret_cast<sockaddr*>(&storage); }
const sockaddr* as_sockaddr(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr*>(&storage);
}

UniqueFd tcp_socket(int family) {
  return UniqueFd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
}

Io wait_for(int fd, short events, const Deadline& deadline) {
  pollfd item{fd, events, 0};
  while (true) {
    const int ready = ::poll(&item, 1, deadline.remaining_ms());
    if (ready > 0) return Io::done;  // an error counts as ready: the next call on fd reports it
    if (ready < 0 && errno != EINTR) fail_errno("poll", errno);
    if (deadline.passed()) return Io::timed_out;
  }
}

bool try_again(int error) { return error == EAGAIN || error == EWOULDBLOCK || error == EINTR; }

}  // namespace

std::string TcpAddress::host() const {
  char text[NI_MAXHOST];
  const int error =
      ::getnameinfo(as_sockaddr(storage), size, text, sizeof(text), nullptr, 0, NI_NUMERICHOST);
  return error == 0 ? text : "(unknown address)";
}

std::uint16_t TcpAddress::port() const {
  // Both families keep the port in the same place.
  return ntohs(reinterpret_cast<const sockaddr_in*>(&storage)->sin_port);
}

std::string TcpAddress::text() const {
  return storage.ss_family == AF_INET6 ? concat("[", host(), "]:", port())
                                       : concat(host(), ":", port());
}

bool TcpAddress::is_wildcard() const {
  if (storage.ss_family == AF_INET6)
    return IN6_IS_ADDR_UNSPECIFIED(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr);
  return reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr == htonl(INADDR_ANY);
}

TcpAddress TcpAddress::with_port(std::uint16_t port) const {
  TcpAddress result = *this;
  reinterpret_cast<sockaddr_in*>(&result.storage)->sin_port = htons(port);
  return result;
}

std::vector<TcpAddress> resolve(const std::string& host, const char* what) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* list = nullptr;
  const int error = ::getaddrinfo(host.c_str(), nullptr, &hints, &list);
  XD_REQUIRE(error == 0, what, " = ", host,
             " is no known address or host name: ", ::gai_strerror(error));
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  std::vector<TcpAddress> addresses;
  for (const addrinfo* item = list; item != nullptr; item = item->ai_next) {
    if (item->ai_family != AF_INET && item->ai_family != AF_INET6) continue;
    TcpAddress address;
    std::memcpy(&address.storage, item->ai_addr, item->ai_addrlen);
    address.size = item->ai_addrlen;
    addresses.push_back(address);
  }
  XD_REQUIRE(!addresses.empty(), what, " = ", host, " has no IPv4 or IPv6 address");
  return addresses;
}

UniqueFd tcp_listen(const TcpAddress& address) {
  UniqueFd fd = tcp_socket(address.storage.ss_family);
  if (!fd) return fd;
  // Closed connections of an earlier meeting linger on the port for a minute; they are no obstacle.
  // A socket that listens there still is.
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  if (::bind(fd.get(), as_sockaddr(address.storage), address.size) != 0 ||
      ::listen(fd.get(), SOMAXCONN) != 0) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

UniqueFd tcp_connect(const TcpAddress& address, const Deadline& deadline) {
  UniqueFd fd = tcp_socket(address.storage.ss_family);
  if (!fd) fail_errno("socket", errno);
  if (::connect(fd.get(), as_sockaddr(address.storage), address.size) == 0) return fd;
  if (errno != EINPROGRESS && errno != EINTR) fail_errno("connect to " + address.text(), errno);
  if (wait_for(fd.get(), POLLOUT, deadline) == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, "no connection to ", address.text(), " in time");
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(fd.get(), SOL_SOCKET, SO_ERROR, &error, &size);
  if (error != 0) fail_errno("connect to " + address.text(), error);
  return fd;
}

TcpAddress local_address(int fd) {
  TcpAddress address;
  address.size = sizeof(address.storage);
  if (::getsockname(fd, as_sockaddr(address.storage), &address.size) != 0)
    fail_errno("getsockname", errno);
  return address;
}

Io wait_readable(int fd, const Deadline& deadline) { return wait_for(fd, POLLIN, deadline); }

Io send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline) {
  while (!bytes.empty()) {
    std::size_t count = 0;
    if (!send_some(fd, bytes, count)) return Io::closed;
    bytes = bytes.subspan(count);
    if (!bytes.empty() && wait_for(fd, POLLOUT, deadline) == Io::timed_out) return Io::timed_out;
  }
  return Io::done;
}

bool receive_some(int fd, std::span<std::byte> bytes, std::size_t& count) {
  const ssize_t got = ::recv(fd, bytes.data(), bytes.size(), MSG_DONTWAIT);
  count = got > 0 ? static_cast<std::size_t>(got) : 0;
  return got > 0 || (got < 0 && try_again(errno));
}

bool send_some(int fd, std::span<const std::byte> bytes, std::size_t& count) {
  const ssize_t sent = ::send(fd, bytes.data(), bytes.size(), MSG_DONTWAIT | MSG_NOSIGNAL);
  count = sent > 0 ? static_cast<std::size_t>(sent) : 0;
  return sent >= 0 || try_again(errno);
}

}  // namespace xd
