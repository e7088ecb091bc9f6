// The memory that ranks are about to take, compared before any of them takes it. Ranks that share a
// limit see the same free memory; without the comparison each would take it, and they would meet
// the kernel's OOM killer.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "memory/available.h"

namespace xd {

// The demand of one rank, as it is sent to the others.
struct MemoryDemand {
  static constexpr std::size_t kMaxLimits = 8;
  struct Limit {
    std::array<std::uint64_t, 2> id{};  // 0, 0 with nothing left: no limit
    std::uint64_t left = UINT64_MAX;
  };

  std::uint64_t bytes = 0;       // bytes that this rank is about to take, rounded up to pages
  std::uint64_t huge_pages = 0;  // bytes that are left in the pool of huge pages
  std::uint64_t process = 0;     // process whose page tables map all ranks' memory; 0 = none
  std::array<Limit, kMaxLimits> limits;
};

// A demand with the names of its limits, which only this rank knows.
struct OwnDemand {
  MemoryDemand demand;
  std::vector<std::string> names;  // names of demand.limits
};

// Makes this rank's demand. If there are too many limits it keeps the tightest, and always the
// host's.
OwnDemand make_demand(std::uint64_t bytes, std::vector<MemoryLimit> limits);

// Throws if ranks that share a limit ask for more than it leaves: OUT_OF_MEMORY on those ranks, and
// MISMATCH naming them on the others. All ranks have the same `of_rank`, so they throw together.
// `own` is of_rank[rank].
void require_together(std::span<const MemoryDemand> of_rank, int rank, const OwnDemand& own);

}  // namespace xd
