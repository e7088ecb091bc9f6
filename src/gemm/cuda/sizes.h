// The memory that a context takes, by its bounds. Pure.
#pragma once

#include <crossdock/gemm.h>

#include <cstdint>

#include "gemm/config.h"
#include "gemm/cuda/params.h"

namespace xd::gemm::cuda {

// The memory that this rank shares with its peers.
ContextMap map_of(const Config& config);

// Memory of the device that peers do not see: products before they are summed or finished; exact
// results beside these; column sums of this rank; scales of one operand.
std::uint64_t scratch_bytes(const Config& config);
std::uint64_t exact_bytes(const Config& config);
std::uint64_t column_bytes(const Config& config);
std::int64_t scales_count(const Config& config);
std::uint64_t scales_bytes(const Config& config);
// Of products with scales per 128 columns.
std::uint64_t block_scale_bytes(const Config& config);

xd_gemm_memory context_memory(const Config& config);

}  // namespace xd::gemm::cuda
