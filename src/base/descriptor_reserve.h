// Descriptors that a rank takes before the ranks meet, and gives up one by one for the connections
// that follow. So a rank that has too few knows it in time to say so.
#pragma once

#include <fcntl.h>

#include <cerrno>
#include <cstddef>
#include <vector>

#include "base/error.h"
#include "base/fd.h"

namespace xd {

class DescriptorReserve {
 public:
  DescriptorReserve() = default;
  // Throws SYSTEM if there are not `count` more; they are copies of `fd`.
  DescriptorReserve(int fd, std::size_t count) {
    held_.reserve(count);
    while (held_.size() < count) {
      held_.emplace_back(::fcntl(fd, F_DUPFD_CLOEXEC, 0));
      if (!held_.back())
        fail_errno(concat("descriptors for ", count, " connections (", held_.size() - 1,
                          " could be opened)"),
                   errno);
    }
  }

  std::size_t size() const { return held_.size(); }
  void shrink_to(std::size_t count) {
    while (held_.size() > count) held_.pop_back();
  }

 private:
  std::vector<UniqueFd> held_;
};

}  // namespace xd
