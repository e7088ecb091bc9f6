// TCP sockets, all of them non-blocking and close-on-exec; every wait has a deadline.
#pragma once

#include <sys/socket.h>

#include <cstddef>
#include <cstdint>
#include <optional>
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
  bool is_loopback() const;
  // True if it means something on one link only, so that a rank elsewhere cannot use it.
  bool is_link_local() const;
  bool is_ipv6() const { return storage.ss_family == AF_INET6; }
  TcpAddress with_port(std::uint16_t port) const;
};

// The addresses of a host name or numeric address, in the system's order of preference. Looking up
// a name takes as long as the system's resolver takes. Throws INVALID_ARGUMENT naming `what`, also
// where an address has a flaw(), so that no process listens on every interface or calls all hosts.
std::vector<TcpAddress> resolve(const std::string& host, const char* what);

// The address that `text` spells in numbers; nothing if it spells none.
std::optional<TcpAddress> numeric_address(const std::string& text);

// The address in the form in which the system hands it out. Its size follows from its family.
TcpAddress from_sockaddr(const sockaddr& address);

// `receive_room`, here and below: the bytes that this system takes for a connection while nobody
// reads them, if it may have so many (net.core.rmem_max); 0 = as the system decides.

// Listens on exactly this address; port 0 = any free one. Returns no descriptor and sets errno if
// that is impossible.
UniqueFd tcp_listen(const TcpAddress& address, int receive_room = 0);

// Begins to connect. Once the socket is writable, connect_error() is 0 or the reason of the
// failure. Returns no descriptor and sets errno if it has failed already. The connection comes from
// the host of `from`, if given.
UniqueFd tcp_begin_connect(const TcpAddress& address, const TcpAddress* from = nullptr,
                           int receive_room = 0);
int connect_error(int fd);

// Connects. Throws SYSTEM (refused, unreachable) or TIMEOUT.
UniqueFd tcp_connect(const TcpAddress& address, const Deadline& deadline);

// Accepts a connection, and tells where it comes from: a connection that has been reset since knows
// that no more. Returns no descriptor and sets errno if there is none.
UniqueFd tcp_accept(int listener, TcpAddress& from);

TcpAddress local_address(int fd);

// When the system asks the other end of a connection for a sign of life, and when it gives up, so
// that an interruption shorter than `silence_ms` ends nothing.
struct SilenceBounds {
  int pause_ms;  // between two questions, in whole seconds; the answer to one after the end counts
  int give_up_ms;  // from the last thing that came on
};
SilenceBounds bounds_of_silence(int silence_ms);

// Makes the system watch a connection: it asks the other end's system for a sign of life several
// times in `silence_ms`, which is at least 1000, and ends the connection when nothing has come for
// that long and two pauses more; 0 = it never does. Linux before 6.15 needs as long again where
// data are under way. A process at the other end that is stopped or busy is no silence, as long as
// its system has room for what it is sent.
// Bytes that are sent go out at once. Throws SYSTEM.
void set_silence(int fd, int silence_ms);
// True for errors that say nothing of the connection: this system had no memory just now.
bool is_passing(int error);
// True for the errors with which the system ends a connection for silence. It then tells the last
// of many things that it has heard of the way there, so these are all but the other end's own.
bool is_silence(int error);
// True if the other end's system has all that was sent, or the connection is over.
bool all_acknowledged(int fd);

enum class Io { done, closed, timed_out };

Io wait_readable(int fd, const Deadline& deadline);
Io send_all(int fd, std::span<const std::byte> bytes, const Deadline& deadline);

// Reads the bytes that are there, at most bytes.size() > 0. `count` = 0 if there are none yet;
// false = the connection is over.
bool receive_some(int fd, std::span<std::byte> bytes, std::size_t& count);
// Sends the bytes that fit now; false = the connection is over.
bool send_some(int fd, std::span<const std::byte> bytes, std::size_t& count);

}  // namespace xd
