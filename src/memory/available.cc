#include "memory/available.h"

#include <algorithm>
#include <fstream>
#include <initializer_list>
#include <optional>
#include <sstream>
#include <string_view>

namespace xd {
namespace {

constexpr std::uint64_t kUnlimited = UINT64_MAX;

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

// The number in a file that holds one; nothing if it is absent or holds a word ("max").
std::optional<std::uint64_t> read_number(const std::string& path) {
  std::ifstream file(path);
  std::uint64_t value = 0;
  if (file >> value) return value;
  return std::nullopt;
}

// Sum of the numbers in the lines "<key> <number> ..." of a file; nothing if no such line exists.
std::optional<std::uint64_t> sum_of_lines(const std::string& path,
                                          std::initializer_list<std::string_view> keys) {
  std::ifstream file(path);
  std::optional<std::uint64_t> sum;
  for (std::string line; std::getline(file, line);) {
    std::istringstream words(line);
    std::string key;
    std::uint64_t value = 0;
    if (words >> key >> value && std::find(keys.begin(), keys.end(), key) != keys.end()) {
      sum = sum.value_or(0) + value;
    }
  }
  return sum;
}

std::uint64_t available_in_system(const std::string& root) {
  const auto kib = sum_of_lines(root + "/proc/meminfo", {"MemAvailable:", "SwapFree:"});
  return kib ? *kib * 1024 : kUnlimited;
}

std::uint64_t available_in_group(const std::string& directory, const Controller& files) {
  const auto limit = read_number(directory + "/" + files.limit);
  const auto usage = read_number(directory + "/" + files.usage);
  if (!limit || !usage) return kUnlimited;
  const auto cache =
      sum_of_lines(directory + "/memory.stat", {files.inactive_cache, files.active_cache});
  const std::uint64_t kept = *usage - std::min(*usage, cache.value_or(0));
  return *limit - std::min(*limit, kept);
}

// The least of a group and all groups above it. Inside a container the path may be the host's, of
// which only the container's own part is visible, as the root: absent directories limit nothing.
std::uint64_t available_in_groups(const std::string& mount, std::string path,
                                  const Controller& files) {
  std::uint64_t least = available_in_group(mount, files);
  while (path.size() > 1) {
    least = std::min(least, available_in_group(mount + path, files));
    path.resize(path.rfind('/'));
  }
  return least;
}

}  // namespace

std::uint64_t available_memory(const std::string& root) {
  const std::string mount = root + "/sys/fs/cgroup";
  std::uint64_t least = available_in_system(root);
  std::ifstream groups(root + "/proc/self/cgroup");
  // Each line is "<number>:<controllers>:<path>"; version 2 has number 0 and names no controller.
  for (std::string line; std::getline(groups, line);) {
    const auto first = line.find(':');
    const auto second = line.find(':', first + 1);
    if (first == std::string::npos || second == std::string::npos) continue;
    const std::string controllers = "," + line.substr(first + 1, second - first - 1) + ",";
    const std::string path = line.substr(second + 1);
    if (path.empty() || path.front() != '/') continue;
    if (controllers == ",,") {
      least = std::min(least, available_in_groups(mount, path, kVersion2));
    } else if (controllers.find(",memory,") != std::string::npos) {
      least = std::min(least, available_in_groups(mount + "/memory", path, kVersion1));
    }
  }
  return least;
}

}  // namespace xd
