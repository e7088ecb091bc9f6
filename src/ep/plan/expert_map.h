// Which rank holds which experts. The caller says so expert by expert (expert_ranks), or says
// nothing: then every rank holds E / W experts, in order.
//
// Inside, an expert goes by its physical number, which counts the experts of rank 0 first, by
// ascending expert, then those of rank 1, and so on. So the experts of a rank have the physical
// numbers first(rank) to first(rank + 1) - 1, whoever holds which, and a local expert is its
// physical number less first(rank). Where the caller says nothing, an expert's physical number is
// its own.
#pragma once

#include <cstdint>
#include <memory>
#include <vector>

namespace xd::ep {

// The map as plain data, for host and device. Its tables lie elsewhere.
struct ExpertMap {
  int experts = 0, ranks = 1;
  int each = 0;                    // experts of every rank, in order; 0 = see the tables
  std::uint64_t each_inverse = 0;  // 2^32 / each, rounded up
  const std::uint32_t* physical_experts = nullptr;  // [E] physical number of each expert
  const std::uint32_t* physical_ranks = nullptr;    // [E+1] rank of each physical number, and W
  const std::uint32_t* firsts = nullptr;  // [W+1] first physical number of each rank, and E

  constexpr bool has_tables() const { return each == 0; }
  constexpr int physical_expert_of(int expert) const {
    return each > 0 ? expert : static_cast<int>(physical_experts[expert]);
  }
  // For physical numbers up to E, where it is W.
  constexpr int rank_at(int physical_expert) const {
    // A division by a product, which takes a device a tenth of the time; exact while physical
    // expert * each is below 2^32.
    return each > 0
               ? static_cast<int>(static_cast<std::uint64_t>(physical_expert) * each_inverse >> 32)
               : static_cast<int>(physical_ranks[physical_expert]);
  }
  constexpr int rank_of(int expert) const { return rank_at(physical_expert_of(expert)); }
  // For ranks up to W, where it is E.
  constexpr int first(int rank) const {
    return each > 0 ? rank * each : static_cast<int>(firsts[rank]);
  }
  constexpr int local_experts(int rank) const { return first(rank + 1) - first(rank); }
};

// A map and its tables, in the host's memory. Copies share the tables.
class ExpertTables {
 public:
  ExpertTables() = default;

  // `expert_ranks` is [experts], or NULL. Throws INVALID_ARGUMENT naming `prefix` and the argument.
  static ExpertTables read(const std::int32_t* expert_ranks, int experts, int ranks,
                           const char* prefix);
  // `experts` is a multiple of `ranks`.
  static ExpertTables even(int experts, int ranks);

  const ExpertMap& map() const { return map_; }
  // The largest number of experts that a rank holds.
  int most_local_experts() const { return most_local_experts_; }
  // The smallest.
  int least_local_experts() const { return least_local_experts_; }
  // Equal for equal maps; 0 where every rank holds E / W experts in order, however that was said.
  std::uint64_t hash() const { return hash_; }

 private:
  struct Tables {
    std::vector<std::uint32_t> physical_experts, physical_ranks, firsts;
  };

  ExpertMap map_;
  std::shared_ptr<const Tables> tables_;
  int most_local_experts_ = 0, least_local_experts_ = 0;
  std::uint64_t hash_ = 0;
};

}  // namespace xd::ep
