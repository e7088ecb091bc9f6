// The things of the system that this process holds: descriptors, threads and shared memory.
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>

namespace xd::test {

inline std::size_t entries_of(const char* folder) {
  return static_cast<std::size_t>(std::distance(std::filesystem::directory_iterator(folder),
                                                std::filesystem::directory_iterator()));
}

inline std::size_t open_descriptors() { return entries_of("/proc/self/fd"); }

// False for a thread that has ended. The kernel still lists such a thread for a while after join()
// has returned; it marks the thread before it lets join() return.
inline bool is_alive(const std::filesystem::path& task) {
  constexpr unsigned kExiting = 0x4;  // PF_EXITING of the kernel
  std::ifstream file(task / "stat");
  std::string stat;
  if (!std::getline(file, stat)) return false;
  std::istringstream fields(stat.substr(stat.rfind(')') + 1));
  std::string state, parent, process_group, session, terminal, foreground;
  unsigned flags = 0;
  fields >> state >> parent >> process_group >> session >> terminal >> foreground >> flags;
  return (flags & kExiting) == 0;
}

inline std::size_t live_threads() {
  std::size_t count = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    count += is_alive(task.path()) ? 1 : 0;
  }
  return count;
}

// Bytes of shared memory that this process has mapped, each segment once.
inline std::size_t shared_bytes() {
  std::ifstream maps("/proc/self/maps");
  std::map<std::string, std::size_t> segments;  // by inode
  for (std::string line; std::getline(maps, line);) {
    // The segment of counters is sparse: a page for the process, and a page or three for each
    // group.
    if (line.find("/memfd:") == std::string::npos || line.find("crossdock-stats") != line.npos)
      continue;
    std::istringstream fields(line);
    std::string range, permissions, offset, device, inode;
    fields >> range >> permissions >> offset >> device >> inode;
    const std::size_t dash = range.find('-');
    segments[inode] += std::stoull(range.substr(dash + 1), nullptr, 16) -
                       std::stoull(range.substr(0, dash), nullptr, 16);
  }
  std::size_t bytes = 0;
  for (const auto& [inode, size] : segments) bytes += size;
  return bytes;
}

}  // namespace xd::test
