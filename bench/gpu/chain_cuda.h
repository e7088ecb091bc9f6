// Chains of batches on GPUs.
#pragma once

#include "../chain.h"

namespace bench::gpu {

// Returns the exit code.
int run_ep_chain(const Options& options);

// Collective; of one rank.
ChainResult run_ll_chain(const Launch& launch, int rank, const Workload& workload,
                         const Traffic& traffic, int links);

}  // namespace bench::gpu
