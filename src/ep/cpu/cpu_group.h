// The CPU executor of a group: every operation has finished when its call returns.
#pragma once

#include <memory>

#include "ep/group.h"

namespace xd::ep::cpu {

// Collective.
std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config);

// The memory that a group takes on one rank.
xd_ep_memory group_memory(const Config& config);

}  // namespace xd::ep::cpu
