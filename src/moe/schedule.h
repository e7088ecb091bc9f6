// The schedule and the memory that a layer's sizes ask for: pure functions.
#pragma once

#include <crossdock/moe.h>

#include <cstdint>

namespace xd::moe {

// Throw INVALID_ARGUMENT.
xd_moe_memory memory_of(const xd_ep_config* config, std::int32_t ffn);
xd_moe_overlap choose_schedule(const xd_ep_config* config, std::int32_t ffn, std::int32_t tokens);

}  // namespace xd::moe
