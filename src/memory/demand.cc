#include "memory/demand.h"

#include <algorithm>
#include <set>

#include "base/error.h"
#include "base/math.h"
#include "base/rank_list.h"

namespace xd {
namespace {

constexpr std::uint64_t kHugePage = std::uint64_t{2} << 20;
constexpr std::uint64_t kMappedPerTableByte = 512;  // an entry of 8 bytes for each page of 4096

std::uint64_t add(std::uint64_t a, std::uint64_t b) {
  return a > UINT64_MAX - b ? UINT64_MAX : a + b;
}

using Id = std::array<std::uint64_t, 2>;

const MemoryDemand::Limit* find(const MemoryDemand& demand, const Id& id) {
  const auto found = std::ranges::find_if(demand.limits, [&](const MemoryDemand::Limit& limit) {
    return limit.left != UINT64_MAX && limit.id == id;
  });
  return found != demand.limits.end() ? &*found : nullptr;
}

// The identities of all limits, in an order that is the same on all ranks.
std::set<Id> ids_of(std::span<const MemoryDemand> of_rank) {
  std::set<Id> ids;
  for (const MemoryDemand& demand : of_rank) {
    for (const MemoryDemand::Limit& limit : demand.limits) {
      if (limit.left != UINT64_MAX) ids.insert(limit.id);
    }
  }
  return ids;
}

// By rank, the bytes that it takes from ordinary memory: huge pages go first to the ranks whose
// whole demand they cover.
std::vector<std::uint64_t> ordinary_bytes(std::span<const MemoryDemand> of_rank) {
  std::uint64_t pool = UINT64_MAX;
  for (const MemoryDemand& demand : of_rank) pool = std::min(pool, demand.huge_pages);
  std::vector<std::uint64_t> bytes;
  for (const MemoryDemand& demand : of_rank) {
    const bool fits = demand.bytes >= kHugePage && demand.bytes <= pool &&
                      round_up(demand.bytes, kHugePage) <= pool;
    if (fits) pool -= round_up(demand.bytes, kHugePage);
    bytes.push_back(fits ? 0 : demand.bytes);
  }
  return bytes;
}

// The sum of what the ranks that share one limit need of it.
struct Need {
  std::uint64_t left = UINT64_MAX;
  std::uint64_t bytes = 0;
  std::uint64_t page_tables = 0;
  std::vector<int> ranks;  // ranks that take something
};

Need need_of(std::span<const MemoryDemand> of_rank, const Id& id) {
  const std::vector<std::uint64_t> ordinary = ordinary_bytes(of_rank);
  Need need;
  std::uint64_t mapped = 0;
  std::set<std::uint64_t> processes;
  for (std::size_t r = 0; r < of_rank.size(); ++r) {
    mapped = add(mapped, ordinary[r]);
    const MemoryDemand::Limit* limit = find(of_rank[r], id);
    if (limit == nullptr) continue;
    need.left = std::min(need.left, limit->left);
    if (of_rank[r].process != 0) processes.insert(of_rank[r].process);
    if (ordinary[r] == 0) continue;
    need.bytes = add(need.bytes, ordinary[r]);
    need.ranks.push_back(static_cast<int>(r));
  }
  need.page_tables = mapped / kMappedPerTableByte * processes.size();
  return need;
}

}  // namespace

OwnDemand make_demand(std::uint64_t bytes, std::vector<MemoryLimit> limits) {
  if (limits.size() > MemoryDemand::kMaxLimits) {
    std::ranges::stable_sort(limits.begin() + 1, limits.end(), {}, &MemoryLimit::left);
    limits.resize(MemoryDemand::kMaxLimits);
  }
  OwnDemand own;
  own.demand.bytes = bytes;
  for (std::size_t i = 0; i < limits.size(); ++i) {
    own.demand.limits[i] = {limits[i].id, limits[i].left};
    own.names.push_back(limits[i].name);
  }
  return own;
}

void require_together(std::span<const MemoryDemand> of_rank, int rank, const OwnDemand& own) {
  for (const Id& id : ids_of(of_rank)) {
    const Need need = need_of(of_rank, id);
    // A rank that alone asks for too much finds that mistake itself.
    if (need.ranks.size() < 2 || add(need.bytes, need.page_tables) <= need.left) continue;
    const std::string ask = concat(rank_list(need.ranks), " together asked ", need.bytes,
                                   " bytes of shared memory, and page tables take ",
                                   need.page_tables, "; available ", need.left, " bytes");
    if (std::ranges::find(need.ranks, rank) == need.ranks.end()) fail(XD_ERROR_MISMATCH, ask);
    const auto number = find(own.demand, id) - own.demand.limits.data();
    fail(XD_ERROR_OUT_OF_MEMORY, ask, " of ", own.names[at(number)], "; rank ", rank, " asked ",
         own.demand.bytes);
  }
}

}  // namespace xd
