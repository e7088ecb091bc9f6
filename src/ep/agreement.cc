#include "ep/agreement.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>

#include "base/error.h"
#include "base/hash.h"

namespace xd::ep {
namespace {

using Field = turn::EqualField<CommonTerms>;
constexpr std::array kEqualFields = {
    Field{"num_experts", &CommonTerms::experts},
    Field{"max_topk", &CommonTerms::max_topk},
    Field{"max_tokens_per_rank", &CommonTerms::max_tokens},
    Field{"hidden * size of dtype", &CommonTerms::max_row_bytes},
    Field{"duplicate_ids", &CommonTerms::duplicate_ids,
          [](std::int64_t value) { return value != 0 ? "COLLAPSE" : "ERROR"; }},
    Field{"on_error", &CommonTerms::on_error,
          [](std::int64_t value) { return value != 0 ? "FATAL" : "STATUS"; }},
    Field{"wire_formats", &CommonTerms::wire_formats},
    Field{"num_logical_experts", &CommonTerms::logical_experts},
};

// Differs from every other that was ever made on this host, as a process makes one at a time.
std::uint64_t new_nonce() {
  static std::atomic<std::uint64_t> made{0};
  const auto now = std::chrono::steady_clock::now().time_since_epoch().count();
  const std::uint64_t hash = hash_combine(static_cast<std::uint64_t>(::getpid()), ++made);
  return hash_combine(hash, static_cast<std::uint64_t>(now));
}

// Throws MISMATCH with the first expert that some rank places elsewhere than rank 0 does. Maps are
// too long to be announced, and all ranks know from their hashes whether any differs: so all ranks
// call this, or none does. They have the same number of experts.
void compare_maps(CollectiveCall call, Collective& collective, const ExpertMap& map) {
  using Home = std::uint16_t;
  constexpr int kExpertsAtOnce = 8192;
  static_assert(kMaxRanks <= 1 << 16 && kExpertsAtOnce * sizeof(Home) < Mesh::kMaxBlob);
  for (int begin = 0; begin < map.experts; begin += kExpertsAtOnce) {
    const auto of_rank = collective.agree_on(call, [&] {
      std::array<Home, kExpertsAtOnce> homes{};
      for (int e = begin; e < std::min(begin + kExpertsAtOnce, map.experts); ++e) {
        homes[at(e - begin)] = static_cast<Home>(map.rank_of(e));
      }
      return homes;
    });
    for (std::size_t i = 0; i < kExpertsAtOnce; ++i) {
      for (std::size_t r = 1; r < of_rank.size(); ++r) {
        const Home first = of_rank[0][i], other = of_rank[r][i];
        if (first == other) continue;
        fail(XD_ERROR_MISMATCH, "config.expert_ranks[", at(begin) + i, "] = ", first,
             " on rank 0 and ", other, " on rank ", r, ", expected equal values");
      }
    }
  }
}

}  // namespace

CommonTerms CommonTerms::of(const CommonConfig& config) {
  return {.experts = config.experts,
          .max_topk = config.max_topk,
          .max_tokens = config.max_tokens,
          .max_row_bytes = static_cast<std::int64_t>(config.max_row_bytes),
          .duplicate_ids = config.collapse,
          .on_error = config.fatal_errors,
          .wire_formats = config.wire_formats,
          .logical_experts = config.logical_experts,
          .expert_ranks = config.expert_tables.hash(),
          .nonce = new_nonce()};
}

void require_device(const CommonConfig& config, const Comm& comm) {
  const int device_type = comm.device().device_type;
  XD_REQUIRE(config.device_type == 0 || config.device_type == device_type,
             "config.device_type = ", config.device_type, ", expected 0 or the communicator's ",
             device_type);
}

void require_common(CollectiveCall call, Comm& comm, const CommonConfig& config,
                    const std::vector<CommonTerms>& of_rank) {
  turn::require_equal<CommonTerms>(kEqualFields, of_rank);
  const auto has_my_map = [&](const CommonTerms& terms) {
    return terms.expert_ranks == config.expert_tables.hash();
  };
  if (!std::ranges::all_of(of_rank, has_my_map)) {
    compare_maps(call, comm.collective(), config.map());
  }
}

void require_common_as_theirs(const CommonTerms& theirs, const CommonTerms& mine) {
  turn::require_as_theirs<CommonTerms>(kEqualFields, theirs, mine);
  XD_REQUIRE(mine.expert_ranks == theirs.expert_ranks,
             "config.expert_ranks: places experts otherwise than the others have it");
}

std::string common_sizes(const CommonConfig& config) {
  return concat("E=", config.experts, " K<=", config.max_topk, " T<=", config.max_tokens,
                " row<=", config.max_row_bytes, " B");
}

}  // namespace xd::ep
