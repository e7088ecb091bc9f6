#include "faults/control_group.h"

#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <vector>

namespace xd::test {
namespace {

bool write_number(const std::string& path, std::uint64_t number) {
  std::ofstream file(path);
  return static_cast<bool>(file << number << std::flush);
}

// This process's groups with a memory controller, each followed by those above it.
std::vector<std::string> directories() {
  std::vector<std::string> found;
  std::ifstream groups("/proc/self/cgroup");
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':'), second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    std::string mount = "/sys/fs/cgroup";
    if (controllers.find(",memory,") != std::string::npos)
      mount += "/memory";
    else if (controllers != ",,")
      continue;
    for (std::string path = line.substr(second + 1); path.size() > 1;
         path.resize(path.rfind('/'))) {
      found.push_back(mount + path);
    }
    found.push_back(mount);
  }
  return found;
}

}  // namespace

std::unique_ptr<ControlGroup> ControlGroup::make(std::uint64_t bytes) {
  for (const std::string& parent : directories()) {
    const std::string directory = parent + "/crossdock-test-" + std::to_string(::getpid());
    if (::mkdir(directory.c_str(), 0755) != 0) continue;
    std::unique_ptr<ControlGroup> group(new ControlGroup(directory));
    for (const char* limit : {"/memory.max", "/memory.limit_in_bytes"}) {
      if (::access((directory + limit).c_str(), W_OK) == 0 &&
          write_number(directory + limit, bytes)) {
        return group;
      }
    }
  }
  return nullptr;
}

ControlGroup::~ControlGroup() { ::rmdir(directory_.c_str()); }

bool ControlGroup::add(pid_t process) const {
  return write_number(directory_ + "/cgroup.procs", static_cast<std::uint64_t>(process));
}

}  // namespace xd::test
