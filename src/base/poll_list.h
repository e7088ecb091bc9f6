// The list that one poll() waits for. It holds only descriptors that are open: the system refuses a
// list longer than the number of descriptors that a process may have.
#pragma once

#include <poll.h>

#include <cstddef>
#include <vector>

namespace xd {

class PollList {
 public:
  void reserve(std::size_t count) { items_.reserve(count); }
  void clear() { items_.clear(); }

  // Its place in the list; -1 if `fd` is none.
  int add(int fd, short events) {
    if (fd < 0) return -1;
    items_.push_back({fd, events, 0});
    return static_cast<int>(items_.size()) - 1;
  }

  // As poll(). Timeout in milliseconds, -1 = none.
  int wait(int timeout_ms) { return ::poll(items_.data(), items_.size(), timeout_ms); }

  bool has_news(int place) const {
    return place >= 0 && items_[static_cast<std::size_t>(place)].revents != 0;
  }

 private:
  std::vector<pollfd> items_;
};

}  // namespace xd
