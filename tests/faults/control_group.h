// A control group (v2 or v1) that belongs to a test, with a limit on memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace xd::test {

class ControlGroup {
 public:
  // Makes a group below this process's own, or below one above that. Null where this is impossible:
  // it takes rights which few users have.
  static std::unique_ptr<ControlGroup> make(std::uint64_t bytes);
  ~ControlGroup();  // call it when the processes in the group have ended
  ControlGroup(const ControlGroup&) = delete;
  ControlGroup& operator=(const ControlGroup&) = delete;

  // Moves a process into the group. Memory that it has already stays with the old group. False =
  // refused.
  bool add(pid_t process) const;

 private:
  explicit ControlGroup(std::string directory) : directory_(std::move(directory)) {}

  std::string directory_;
};

}  // namespace xd::test
