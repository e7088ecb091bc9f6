#include "meet/link.h"

#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>

#include "base/error.h"
#include "base/tcp.h"

namespace xd {
namespace {

constexpr int kLookAgainMs = 1;

// True when the peer's system has all that this rank has said, or the connection is over.
bool has_said_all(const MeshLink& link) {
  // Bytes that are unread when the connection is closed would cut off those that are on their way.
  std::array<std::byte, 4096> unread;
  std::size_t count = 1;
  while (count > 0 && receive_some(link.get(), unread, count)) {
  }
  link.flush();
  if (link.has_unsent()) return false;
  ::shutdown(link.get(), SHUT_WR);
  return all_acknowledged(link.get());
}

bool is_over(int fd) {
  pollfd state{fd, 0, 0};
  return ::poll(&state, 1, 0) > 0 && (state.revents & (POLLERR | POLLHUP)) != 0;
}

}  // namespace

void tell_all(std::span<const MeshLink> links, const MeshHeader& header, std::string_view text,
              const Deadline& deadline) noexcept {
  for (const MeshLink& link : links) {
    while (link && link.send(bytes_of(header), std::as_bytes(std::span(text))) == Sent::full &&
           !deadline.passed()) {
      pollfd room{link.get(), POLLOUT, 0};
      ::poll(&room, 1, deadline.remaining_ms());
    }
  }
}

FailureWords::FailureWords() noexcept : error_(caught(text_)) {}

void FailureWords::tell(std::span<const MeshLink> links, int source) const noexcept {
  tell_all(links, {MeshMessageType::failure, 0, 0, source, error_.status}, text());
}

void finish_saying(std::span<const MeshLink> links, const Deadline& deadline) noexcept {
  const auto waits = [](const MeshLink& link) {
    return link.is_tcp() && !has_said_all(link) && !is_over(link.get());
  };
  while (std::ranges::count_if(links, waits) > 0 && !deadline.passed())
    ::poll(nullptr, 0, kLookAgainMs);
}

}  // namespace xd
