// Groups of EXPERT_SLOTS on CUDA devices.
#pragma once

#include <memory>

#include "ep/group.h"

namespace xd::ep::cuda {

// Collective.
std::unique_ptr<Group> make_ll_group(std::shared_ptr<Comm> comm, const xd_ep_config* config);
xd_ep_memory ll_group_memory(const Config& config);

}  // namespace xd::ep::cuda
