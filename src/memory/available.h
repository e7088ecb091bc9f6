// How much memory this process could still get before the kernel would have to kill something.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

namespace xd {

// A limit on the memory of several processes together.
struct MemoryLimit {
  std::array<std::uint64_t, 2> id{};  // the same in every process of the host that the limit binds
  std::uint64_t left = 0;             // bytes that may still be taken
  std::string name;                   // for error texts
};

// The limits that bind this process: the host, with its free and reclaimable memory plus free swap,
// and each limit set on this process's control group (v2 or v1) or on a group above it. These are
// estimates, since other processes allocate at the same time. Empty if the system tells nothing.
// `root` is where /proc and /sys are looked for.
std::vector<MemoryLimit> memory_limits(const std::string& root = "");

// The limit that leaves least; UINT64_MAX bytes if there is none.
MemoryLimit tightest_limit(const std::string& root = "");

// Bytes that the tightest limit leaves.
std::uint64_t available_memory(const std::string& root = "");

// Bytes in the system's pool of 2 MiB pages that no process has or has reserved. They count against
// none of the limits above.
std::uint64_t available_huge_pages(const std::string& root = "");

}  // namespace xd
