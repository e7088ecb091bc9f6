#include "guardian.h"

#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <set>
#include <system_error>

namespace xd::run {
namespace {

// Reads group numbers, negative ones to forget, until the last other end of the socket is closed.
[[noreturn]] void guard(int socket) {
  // Neither the terminal nor the launcher's output must be held open by this process.
  ::setsid();
  if (socket > 0) ::close_range(0, static_cast<unsigned>(socket) - 1, 0);
  ::close_range(static_cast<unsigned>(socket) + 1, ~0U, 0);
  std::set<pid_t> groups;
  for (;;) {
    pid_t message = 0;
    const ssize_t bytes = ::recv(socket, &message, sizeof(message), 0);
    if (bytes < 0 && errno == EINTR) continue;
    if (bytes != sizeof(message)) break;
    if (message > 0) {
      groups.insert(message);
    } else {
      groups.erase(-message);
    }
  }
  for (const pid_t group : groups) ::kill(-group, SIGKILL);
  ::_exit(0);
}

}  // namespace

Guardian::Guardian() {
  int ends[2];
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) != 0) {
    throw std::system_error(errno, std::generic_category(), "socketpair");
  }
  socket_.reset(ends[0]);
  const UniqueFd other(ends[1]);
  pid_ = ::fork();
  if (pid_ < 0) throw std::system_error(errno, std::generic_category(), "fork");
  if (pid_ == 0) guard(other.get());
}

Guardian::~Guardian() {
  socket_.reset();
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {
  }
}

void Guardian::watch_this_process() const noexcept { tell(::getpid()); }

void Guardian::forget(pid_t group) const noexcept { tell(-group); }

void Guardian::tell(pid_t message) const noexcept {
  // Without a guardian the job runs on: the parent-death signal still ends the ranks themselves.
  ::send(socket_.get(), &message, sizeof(message), MSG_NOSIGNAL);
}

}  // namespace xd::run
