// The CUDA executor of a group: operations are enqueued on the caller's stream.
#pragma once

#include <memory>

#include "ep/group.h"

namespace xd::ep::cuda {

// Collective.
std::unique_ptr<Group> make_group(std::shared_ptr<Comm> comm, const xd_ep_config* config);

// The memory that a group takes on one rank.
xd_ep_memory group_memory(const Config& config);

}  // namespace xd::ep::cuda
