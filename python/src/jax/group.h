// The groups of this process, and the numbers by which handlers find them.
#pragma once

#include <crossdock/crossdock.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "../group_config.h"
#include "problem.h"
#include "ranks.h"
#include "worker.h"

namespace xdjax {

// One config's groups on all ranks of this process. It lives as long as its maker, an executable
// that uses it, or an operation that runs, and keeps the communicators alive.
class Group {
 public:
  struct Member {
    xd_ep_group* group = nullptr;
    int rank = 0;
    DLDevice device{};
    std::unique_ptr<Worker> worker;  // runs the operations; none on CUDA, which has streams
  };

  Group(std::shared_ptr<Ranks> ranks, xdpy::GroupConfig config, std::string text);
  ~Group();
  Group(const Group&) = delete;
  Group& operator=(const Group&) = delete;

  // Makes the groups, unless they have been made. Collective, blocking.
  std::optional<Problem> create();

  // The rank on the device that XLA calls `ordinal`; NULL if there is none.
  [[nodiscard]] Member* on_device(int ordinal);

  // The member of ranks()->all()[index]; NULL before create(), for which it does not wait.
  [[nodiscard]] const Member* member(std::size_t index) const;

  [[nodiscard]] const std::string& text() const { return text_; }
  [[nodiscard]] const std::shared_ptr<Ranks>& ranks() const { return ranks_; }

 private:
  const std::shared_ptr<Ranks> ranks_;
  const xdpy::GroupConfig config_;
  const std::string text_;             // the config, as executables name it
  std::mutex creating_;                // held by create(), which waits for other ranks
  std::atomic<bool> created_ = false;  // set when members_ will not change any more
  std::vector<Member> members_;        // one per entry of ranks_->all()
};

// Gives the group a number that no other group of this process ever gets.
std::int64_t enter_group(const std::shared_ptr<Group>& group);

// The group with that number; NULL if it is gone, or never existed.
std::shared_ptr<Group> find_group(std::int64_t number);

}  // namespace xdjax
