// TCP sockets, all of them non-blocking and close-on-exec; every wait has a deadline.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "base/deadline.h"
#include "base/fd.h"

namespace xd {

struct TcpAddress {
  sockaddr_storage storage{};
  socklen_t size = 0;

  std::string host() const;  // numeric
  std::uint16_t port() const;
  std::string text() const;  // "127.0.0.1:4711", "[::1]:4711"
  // The reason why it is not the address of one host's interface, in any spelling: "the wildcard",
  // "a multicast", "a broadcast"; nullptr if it may be one.
  const char* flaw() const;
  TcpAddress with_port(std::uint16_t port) const;
};

// The addresses of a host name or numeric address, in the system's order of preference. Looking up
// a name takes as long as the system's resolver takes. Throws INVALID_ARGUMENT naming `what`, also
// where an address has a flaw(), so that no process listens on every interface or calls all hosts.
std::vector<TcpAddress> resolve(const std::string& host, const char* what);

// Listens on exactly this address; port 0 = any free one. Returns no descriptor and sets errno if
// that is impossible.
UniqueFd tcp_listen(const TcpAddress& address);

// Begins to connect. Once the socket is writable, connect_error() is 0 or the reason of the
// failure. Returns no descriptor and sets errno if it has failed already.
UniqueFd tcp_begin_connect(const TcpAddress& address);
int connect_error(int fd);

// Connects. Throws SYSTEM (refused, unreachable) or TIMEOUT.
UniqueFd tcp_connect(const TcpAddress& address, const Deadline& deadline);

TcpAddress local_address(int fd);

enum class Io { done, closed, timed_out };

Io wait_readable(int fd, const Deadline& deadline);
Io send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline);

// Reads the bytes that are there, at most bytes.size() > 0. `count` = 0 if there are none yet;
// false = the connection is over.
bool receive_some(int fd, std::span<std::byte> bytes, std::size_t& count);
// Sends the bytes that fit now; false = the connection is over.
bool send_some(int fd, std::span<const std::byte> bytes, std::size_t& count);

}  // namespace xd
