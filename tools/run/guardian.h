// A helper process that ends the ranks, and all processes that they have started, if the launcher
// is killed.
//
// The kernel's parent-death signal reaches a launcher's children only. The guardian also reaches
// their children: it knows the session of each rank, and notices the launcher's end by its socket.
#pragma once

#include <sys/types.h>

#include "base/fd.h"

namespace xd::run {

class Guardian {
 public:
  Guardian();   // throws std::system_error
  ~Guardian();  // to be called when no rank is left
  Guardian(const Guardian&) = delete;
  Guardian& operator=(const Guardian&) = delete;

  // A rank, as leader of its process group, calls this before it runs the program, so that the
  // guardian knows each of the rank's processes. Safe between fork and exec.
  void watch_this_process() const noexcept;

  // The launcher calls this before the system can give the number to another process.
  void forget(pid_t group) const noexcept;

 private:
  void tell(pid_t message) const noexcept;

  pid_t pid_ = -1;
  UniqueFd socket_;
};

}  // namespace xd::run
