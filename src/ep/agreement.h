// Agreement of the ranks about a group's sizes when they make it: the part that groups of both
// kinds have.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "comm/comm.h"
#include "ep/plan/config.h"
#include "turn/agreement.h"

namespace xd::ep {

// The part of a config that ranks tell one another. A kind of groups adds its own.
struct CommonTerms {
  std::int64_t experts, max_topk, max_tokens, max_row_bytes, duplicate_ids, on_error;  // equal
  std::int64_t wire_formats, logical_experts;                                          // equal
  std::uint64_t expert_ranks;  // hash of the expert map
  std::uint64_t nonce;         // rank 0's becomes the group's

  static CommonTerms of(const CommonConfig& config);
};

// Throws INVALID_ARGUMENT where the config is for another kind of devices than the communicator's.
void require_device(const CommonConfig& config, const Comm& comm);

// Throws MISMATCH where ranks disagree about the common part. All ranks call it, or
// none does.
void require_common(CollectiveCall call, Comm& comm, const CommonConfig& config,
                    const std::vector<CommonTerms>& of_rank);

// Throws INVALID_ARGUMENT where the common part of this rank's config is not that of a group which
// the others have.
void require_common_as_theirs(const CommonTerms& theirs, const CommonTerms& mine);

// The common sizes, for people who look: "E=8 K<=2 T<=8 row<=32 B".
std::string common_sizes(const CommonConfig& config);

}  // namespace xd::ep
