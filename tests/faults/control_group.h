// A control group (v2 or v1) of a test's own, with a limit on memory.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <memory>
#include <string>

namespace xd::test {

class ControlGroup {
 public:
  // Below this process's own group, or one above it. Null where none can be made: that takes rights
  // which few users have.
  static std::unique_ptr<ControlGroup> make(std::uint64_t bytes);
  ~ControlGroup();  // when the processes in it have ended
  ControlGroup(const ControlGroup&) = delete;
  ControlGroup& operator=(const ControlGroup&) = delete;

  // Memory that the process has already stays with the group it came from. False = refused.
  bool add(pid_t process) const;

 private:
  explicit ControlGroup(std::string directory) : directory_(std::move(directory)) {}

  std::string directory_;
};

}  // namespace xd::test
