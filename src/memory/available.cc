#include "memory/available.h"

#include <sys/stat.h>

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>

#include "base/error.h"

namespace xd {
namespace {

// Version 1 of control groups says "no limit" by the largest number of whole pages.
constexpr std::uint64_t kNoLimit = std::uint64_t{1} << 62;

// The files of one generation of the memory controller.
struct Controller {
  const char* limit;
  const char* usage;
  // Lines of memory.stat that count file cache, which the kernel drops before it kills. Shared
  // memory is not among them.
  const char* inactive_cache;
  const char* active_cache;
};
constexpr Controller kVersion2{"memory.max", "memory.current", "inactive_file", "active_file"};
constexpr Controller kVersion1{"memory.limit_in_bytes", "memory.usage_in_bytes",
                               "total_inactive_file", "total_active_file"};

// The number in a file; nothing if the file is absent or holds a word ("max").
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// They are all read before one is used: a process may have room for one file and no more.
std::vector<std::string> lines_of(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> lines;
  for (std::string line; std::getline(file, line);) lines.push_back(line);
  return lines;
}

// Sum of the numbers in the lines "<key> <number> ..." of a file; nothing if no such line exists.
std::optional<std::uint64_t> sum_of_lines(const std::string& path,
                                          std::initializer_list<std::string_view> keys) {
  std::optional<std::uint64_t> sum;
  for (const std::string& line : lines_of(path)) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    if (words >> key >> value && std::find(keys.begin(), keys.end(), key) != keys.end()) {
      sum = sum.value_or(0) + value;
    }
  }
  return sum;
}

void add_system(const std::string& root, std::vector<MemoryLimit>& limits) {
  const auto kib = sum_of_lines(root + "/proc/meminfo", {"MemAvailable:", "SwapFree:"});
  if (kib) limits.push_back({.left = *kib * 1024, .name = "this host"});
}

// A group is the same one in all processes that see its directory, wherever they see it.
void add_group(const std::string& mount, const std::string& path, const Controller& files,
               std::vector<MemoryLimit>& limits) {
  const std::string directory = mount + path;
  const auto limit = read_number(directory + "/" + files.limit);
  const auto usage = read_number(directory + "/" + files.usage);
  struct stat status {};
  if (!limit || *limit >= kNoLimit || !usage || ::stat(directory.c_str(), &status) != 0) return;
  const auto cache =
      sum_of_lines(directory + "/memory.stat", {files.inactive_cache, files.active_cache});
  const std::uint64_t kept = *usage - std::min(*usage, cache.value_or(0));
  limits.push_back({.id = {status.st_dev, status.st_ino},
                    .left = *limit - std::min(*limit, kept),
                    .name = concat("control group ", path.empty() ? "/" : path, ", whose ",
                                   files.limit, " is ", *limit)});
}

// A group and all groups above it. Inside a container the path may be the host's, of which only the
// container's own part is visible, as the root: absent directories limit nothing.
void add_groups(const std::string& mount, std::string path, const Controller& files,
                std::vector<MemoryLimit>& limits) {
  while (path.size() > 1) {
    add_group(mount, path, files, limits);
    path.resize(path.rfind('/'));
  }
  add_group(mount, "", files, limits);
}

}  // namespace

std::vector<MemoryLimit> memory_limits(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::vector<MemoryLimit> limits;
  add_system(root, limits);
  // Each line is "<number>:<controllers>:<path>"; version 2 has number 0 and names no controller.
  for (const std::string& line : lines_of(root + "/proc/self/cgroup")) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (path.empty() || path.front() != '/') continue;
    if (controllers == ",,") {
      add_groups(mount, path, kVersion2, limits);
    } else if (controllers.find(",memory,") != std::string::npos) {
      add_groups(mount + "/memory", path, kVersion1, limits);
    }
  }
  return limits;
}

MemoryLimit tightest_limit(const std::string& root) {
  MemoryLimit least{.left = UINT64_MAX, .name = "an unknown system"};
  for (MemoryLimit& limit : memory_limits(root)) {
    if (limit.left < least.left) least = std::move(limit);
  }
  return least;
}

std::uint64_t available_memory(const std::string& root) { return tightest_limit(root).left; }

std::uint64_t available_huge_pages(const std::string& root) {
  const std::string pool = root + "/sys/kernel/mm/hugepages/hugepages-2048kB/";
  const std::uint64_t free = read_number(pool + "free_hugepages").value_or(0);
  const std::uint64_t reserved = read_number(pool + "resv_hugepages").value_or(0);
  return (free - std::min(free, reserved)) << 21;
}

}  // namespace xd
