// The executors of this build: who carries out the operations of groups on one kind of device. One
// folder defines each; executors.cc alone names them.
#pragma once

#include <crossdock/ep.h>
#include <dlpack/dlpack.h>

#include <memory>

#include "ep/bulk/local_calls.h"
#include "ep/group.h"
#include "ep/plan/config.h"

namespace xd::ep {

struct Executor {
  std::int32_t device_type;  // a DLDeviceType: of the ranks whose groups it carries out
  // Collective.
  std::unique_ptr<Group> (*make_group)(std::shared_ptr<Comm> comm, const xd_ep_config* config);
  // The memory that a group takes on one rank.
  xd_ep_memory (*group_memory)(const Config& config);
  // Bulk operations: a local call, which needs no group. When it returns, the call has finished or
  // is on the stream.
  void (*routing_layout)(const RoutingLayoutCall& call, const DLDevice& device,
                         xd_stream stream) = nullptr;
};

namespace cpu {
extern const Executor kBulk, kSlots;
}
namespace cuda {  // in builds for CUDA
extern const Executor kBulk, kSlots;
}

// Of groups in EXPERT_SLOTS, or of the others. Throws UNSUPPORTED where this build has none for
// such devices.
const Executor& executor_for(std::int32_t device_type, bool slots);

}  // namespace xd::ep
