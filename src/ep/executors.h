// The executors of this build: who carries out the operations of groups on one kind of device.
//
// A folder src/ep/<name> with an executor.cmake is an executor; its executor.h declares
// xd::ep::<name>::kExecutor. The build makes the list of them (executor_list.cc.in), so no other
// file names one.
#pragma once

#include <crossdock/ep.h>
#include <dlpack/dlpack.h>

#include <memory>
#include <span>

#include "ep/config.h"
#include "ep/group.h"
#include "ep/local_calls.h"

namespace xd::ep {

struct Executor {
  std::int32_t device_type;  // a DLDeviceType: of the ranks whose groups it carries out
  // Collective.
  std::unique_ptr<Group> (*make_group)(std::shared_ptr<Comm> comm, const xd_ep_config* config);
  // The memory that a group takes on one rank.
  xd_ep_memory (*group_memory)(const Config& config);
  // A local call, which needs no group. When it returns, the call has finished or is on the stream.
  void (*routing_layout)(const RoutingLayoutCall& call, const DLDevice& device, xd_stream stream);
};

std::span<const Executor* const> executors();

// Throws UNSUPPORTED where this build has none for such devices.
const Executor& executor_for(std::int32_t device_type);

}  // namespace xd::ep
