// Descriptors of processes, by which a process's end is noticed.
#pragma once

#include <poll.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

#include "base/fd.h"

namespace xd {

// None, with errno set, where the system has no such descriptors, or the process has ended (ESRCH).
inline UniqueFd open_pidfd(pid_t pid) {
#ifdef SYS_pidfd_open
  return UniqueFd(static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
#else
  errno = ENOSYS;
  return {};
#endif
}

// True if the process of this descriptor has ended: it runs no instruction any more.
inline bool has_process_ended(const UniqueFd& pidfd) {
  pollfd item{pidfd.get(), POLLIN, 0};
  return pidfd && ::poll(&item, 1, 0) > 0;
}

}  // namespace xd
