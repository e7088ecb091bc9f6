#include "base/tcp.h"

#include <linux/sockios.h>
#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/ioctl.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <memory>
#include <optional>

#include "base/error.h"
#include "base/interrupt.h"

namespace xd {
namespace {

constexpr int kProbesInSilence = 10;
constexpr int kLongestProbePause = 32767;  // seconds; the system takes no more
constexpr int kRtoMaxMs = 44;              // TCP_RTO_MAX_MS, which is in the headers of Linux 6.15

sockaddr* as_sockaddr(sockaddr_storage& storage) { return reinterpret_cast<sockaddr*>(&storage); }
const sockaddr* as_sockaddr(const sockaddr_storage& storage) {
  return reinterpret_cast<const sockaddr*>(&storage);
}

UniqueFd tcp_socket(int family, int receive_room) {
  UniqueFd fd(::socket(family, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP));
  // Without it things work, too.
  if (fd && receive_room > 0)
    ::setsockopt(fd.get(), SOL_SOCKET, SO_RCVBUF, &receive_room, sizeof(receive_room));
  return fd;
}

Io wait_for(int fd, short events, const Deadline& deadline) {
  pollfd item{fd, events, 0};
  Interruption interruption;
  while (true) {
    const int ready = ::poll(&item, 1, interruption.next(deadline).remaining_ms());
    if (ready > 0) return Io::done;  // an error counts as ready: the next call on fd reports it
    if (ready < 0 && errno != EINTR) fail_errno("poll", errno);
    interruption.check();
    if (deadline.passed()) return Io::timed_out;
  }
}

// The IPv4 address in `address`, also in its IPv6 spelling (::ffff:a.b.c.d).
std::optional<in_addr> ipv4_in(const sockaddr_storage& address) {
  if (address.ss_family == AF_INET) return reinterpret_cast<const sockaddr_in*>(&address)->sin_addr;
  const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(&address)->sin6_addr;
  if (!IN6_IS_ADDR_V4MAPPED(&six)) return std::nullopt;
  in_addr four{};
  std::memcpy(&four, six.s6_addr + 12, sizeof(four));
  return four;
}

// It depends on the host's networks which addresses are broadcast. The system knows them, and
// refuses to connect a datagram socket to one unless the socket allows broadcast. Nothing is sent.
bool is_broadcast(in_addr address) {
  if (address.s_addr == htonl(INADDR_BROADCAST)) return true;
  const UniqueFd fd(::socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  sockaddr_in target{};
  target.sin_family = AF_INET;
  target.sin_port = htons(9);
  target.sin_addr = address;
  const auto aim = [&] {
    return ::connect(fd.get(), reinterpret_cast<const sockaddr*>(&target), sizeof(target)) == 0;
  };
  if (!fd || aim() || errno != EACCES) return false;
  const int on = 1;
  ::setsockopt(fd.get(), SOL_SOCKET, SO_BROADCAST, &on, sizeof(on));
  return aim();
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

const char* TcpAddress::flaw() const {
  if (const auto four = ipv4_in(storage)) {
    if (four->s_addr == htonl(INADDR_ANY)) return "the wildcard";
    if (IN_MULTICAST(ntohl(four->s_addr))) return "a multicast";
    return is_broadcast(*four) ? "a broadcast" : nullptr;
  }
  const in6_addr& six = reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr;
  if (IN6_IS_ADDR_UNSPECIFIED(&six)) return "the wildcard";
  return IN6_IS_ADDR_MULTICAST(&six) ? "a multicast" : nullptr;
}

bool TcpAddress::is_loopback() const {
  if (const auto four = ipv4_in(storage)) return ntohl(four->s_addr) >> 24 == IN_LOOPBACKNET;
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr) != 0;
}

bool TcpAddress::is_link_local() const {
  if (const auto four = ipv4_in(storage)) return ntohl(four->s_addr) >> 16 == 0xA9FE;
  return IN6_IS_ADDR_LINKLOCAL(&reinterpret_cast<const sockaddr_in6*>(&storage)->sin6_addr) != 0;
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
    const TcpAddress address = from_sockaddr(*item->ai_addr);
    const char* const flaw = address.flaw();
    XD_REQUIRE(flaw == nullptr, what, " = ", host, " is ", flaw,
               " address, expected one address that the other ranks can connect to");
    addresses.push_back(address);
  }
  XD_REQUIRE(!addresses.empty(), what, " = ", host, " has no IPv4 or IPv6 address");
  return addresses;
}

std::optional<TcpAddress> numeric_address(const std::string& text) {
  addrinfo hints{};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_NUMERICHOST;
  addrinfo* list = nullptr;
  if (::getaddrinfo(text.c_str(), nullptr, &hints, &list) != 0) return std::nullopt;
  const std::unique_ptr<addrinfo, decltype(&::freeaddrinfo)> owner(list, &::freeaddrinfo);
  return from_sockaddr(*list->ai_addr);
}

TcpAddress from_sockaddr(const sockaddr& address) {
  TcpAddress result;
  result.size = address.sa_family == AF_INET6 ? sizeof(sockaddr_in6) : sizeof(sockaddr_in);
  std::memcpy(&result.storage, &address, result.size);
  return result;
}

UniqueFd tcp_listen(const TcpAddress& address, int receive_room) {
  UniqueFd fd = tcp_socket(address.storage.ss_family, receive_room);
  if (!fd) return fd;
  // Closed connections of an earlier meeting linger on the port for a minute; they are no obstacle.
  // A socket that listens there still is one.
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

UniqueFd tcp_begin_connect(const TcpAddress& address, const TcpAddress* from, int receive_room) {
  UniqueFd fd = tcp_socket(address.storage.ss_family, receive_room);
  if (!fd) return fd;
  const TcpAddress here = from != nullptr ? from->with_port(0) : TcpAddress{};
  const bool bound = from == nullptr || ::bind(fd.get(), as_sockaddr(here.storage), here.size) == 0;
  if (bound && ::connect(fd.get(), as_sockaddr(address.storage), address.size) == 0) return fd;
  if (!bound || (errno != EINPROGRESS && errno != EINTR)) {
    const int error = errno;
    fd.reset();
    errno = error;
  }
  return fd;
}

int connect_error(int fd) {
  int error = 0;
  socklen_t size = sizeof(error);
  ::getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
  return error;
}

UniqueFd tcp_connect(const TcpAddress& address, const Deadline& deadline) {
  UniqueFd fd = tcp_begin_connect(address);
  if (!fd) fail_errno("connect to " + address.text(), errno);
  if (wait_for(fd.get(), POLLOUT, deadline) == Io::timed_out)
    fail(XD_ERROR_TIMEOUT, "no connection to ", address.text(), " in time");
  if (const int error = connect_error(fd.get()); error != 0)
    fail_errno("connect to " + address.text(), error);
  return fd;
}

UniqueFd tcp_accept(int listener, TcpAddress& from) {
  from.size = sizeof(from.storage);
  return UniqueFd(
      ::accept4(listener, as_sockaddr(from.storage), &from.size, SOCK_CLOEXEC | SOCK_NONBLOCK));
}

TcpAddress local_address(int fd) {
  TcpAddress address;
  address.size = sizeof(address.storage);
  if (::getsockname(fd, as_sockaddr(address.storage), &address.size) != 0)
    fail_errno("getsockname", errno);
  return address;
}

// The last thing may have come a pause before the interruption, and the first question behind its
// end may come a pause later.
SilenceBounds bounds_of_silence(int silence_ms) {
  const int seconds = std::clamp(silence_ms / (1000 * kProbesInSilence), 1, kLongestProbePause);
  const std::int64_t give_up = silence_ms + std::int64_t{2000} * seconds;
  return {.pause_ms = 1000 * seconds,
          .give_up_ms = static_cast<int>(std::min<std::int64_t>(give_up, INT32_MAX))};
}

void set_silence(int fd, int silence_ms) {
  const auto try_to_set = [fd](int level, int name, int value) {
    return ::setsockopt(fd, level, name, &value, sizeof(value)) == 0;
  };
  const auto set = [&](int level, int name, int value) {
    if (!try_to_set(level, name, value)) fail_errno("setsockopt", errno);
  };
  set(IPPROTO_TCP, TCP_NODELAY, 1);
  if (silence_ms <= 0) return;
  const SilenceBounds bounds = bounds_of_silence(silence_ms);
  set(SOL_SOCKET, SO_KEEPALIVE, 1);
  set(IPPROTO_TCP, TCP_KEEPIDLE, bounds.pause_ms / 1000);
  set(IPPROTO_TCP, TCP_KEEPINTVL, bounds.pause_ms / 1000);
  // Data that are under way ask the questions themselves, each time after twice the time; so one
  // may come as long after an interruption as that took. Newer systems bound their pauses.
  const bool are_bounded = try_to_set(IPPROTO_TCP, kRtoMaxMs, std::min(bounds.pause_ms, 120'000));
  const std::int64_t give_up = std::int64_t{bounds.give_up_ms} + (are_bounded ? 0 : silence_ms);
  set(IPPROTO_TCP, TCP_USER_TIMEOUT, static_cast<int>(std::min<std::int64_t>(give_up, INT32_MAX)));
}

bool is_passing(int error) { return error == ENOMEM || error == ENOBUFS; }

bool is_silence(int error) {
  return error != 0 && error != ECONNRESET && error != EPIPE && !is_passing(error);
}

bool all_acknowledged(int fd) {
  int bytes = 0;
  return ::ioctl(fd, SIOCOUTQ, &bytes) != 0 || bytes == 0;
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
