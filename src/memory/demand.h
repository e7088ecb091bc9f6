// What ranks are about to take, compared before any of them takes it: whoever shares a limit with
// others would otherwise see the same free memory as they do, and meet the kernel's OOM killer.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/available.h"

namespace xd {

// One rank's, as it is sent to the others.
struct MemoryDemand {
  static constexpr std::size_t kMaxLimits = 8;
  struct Limit {
    std::array<std::uint64_t, 2> id{};  // 0, 0 and nothing left: none
    std::uint64_t left = UINT64_MAX;
  };

  std::uint64_t bytes = 0;       // that this rank is about to take, rounded up to pages
  std::uint64_t huge_pages = 0;  // bytes that are left in the pool of huge pages
  std::uint64_t process = 0;     // whose page tables will map all ranks' memory; 0 = nobody's
  std::array<Limit, kMaxLimits> limits;
};

// The same with what only this rank knows.
struct OwnDemand {
  MemoryDemand demand;
  std::vector<std::string> names;  // of demand.limits
};

// Of the limits the tightest, if there are too many; the host's is always among them.
OwnDemand make_demand(std::uint64_t bytes, std::vector<MemoryLimit> limits);

// Throws if ranks that share a limit ask for more than it leaves: OUT_OF_MEMORY on those ranks, and
// MISMATCH naming them on the others. All ranks have the same `of_rank` and so throw together.
// `own` is of_rank[rank].
void require_together(std::span<const MemoryDemand> of_rank, int rank, const OwnDemand& own);

}  // namespace xd
