// How much memory this process could still get before the kernel would have to kill something.
#pragma once

#include <cstdint>
#include <string>

namespace xd {

// Bytes: free and reclaimable memory plus free swap, and no more than any limit set on this
// process's control group (v2 or v1) or on a group above it. An estimate: others allocate too.
// UINT64_MAX if the system tells nothing. `root` is where /proc and /sys are looked for.
std::uint64_t available_memory(const std::string& root = "");

}  // namespace xd
