// The executors of this build: who carries out the operations of groups on one kind of device. One
// folder defines each; executors.cc alone names them.
#pragma once

#include <crossdock/low_latency.h>
#include <dlpack/dlpack.h>

#include <memory>

namespace xd {
class Comm;
}

namespace xd::ep {

class Group;
struct Config;
struct RoutingLayoutCall;
struct GatedCall;
struct GroupedProductCall;
struct GroupedOuterCall;
class LlGroup;
struct LlConfig;

// Of groups of ep.h.
struct BulkExecutor {
  std::int32_t device_type;  // a DLDeviceType: of the ranks whose groups it carries out
  // Collective.
  std::unique_ptr<Group> (*make_group)(std::shared_ptr<Comm> comm, const xd_ep_config* config);
  // The memory that a group takes on one rank.
  xd_ep_memory (*group_memory)(const Config& config);
  // A local call, which needs no group. When it returns, it has finished or is on the stream.
  void (*routing_layout)(const RoutingLayoutCall& call, const DLDevice& device, xd_stream stream);
};

// Of operations on experts' rows (gated.h, grouped.h), which need neither group nor peers. When one
// returns, it has finished or is on the stream.
struct ExpertsExecutor {
  std::int32_t device_type;
  void (*gated)(const GatedCall& call, const DLDevice& device, xd_stream stream);
  void (*grouped_product)(const GroupedProductCall& call, const DLDevice& device, xd_stream stream);
  void (*grouped_outer)(const GroupedOuterCall& call, const DLDevice& device, xd_stream stream);
  // Throw what these two would throw of their arguments, and start nothing.
  void (*check_product)(const GroupedProductCall& call, const DLDevice& device);
  void (*check_outer)(const GroupedOuterCall& call, const DLDevice& device);
};

// Of groups of low_latency.h.
struct SlotsExecutor {
  std::int32_t device_type;
  std::unique_ptr<LlGroup> (*make_group)(std::shared_ptr<Comm> comm, const xd_ll_config* config);
  xd_ll_memory (*group_memory)(const LlConfig& config);
};

namespace cpu {
extern const BulkExecutor kBulk;
extern const ExpertsExecutor kExperts;
extern const SlotsExecutor kSlots;
}  // namespace cpu
namespace cuda {  // in builds for CUDA
extern const BulkExecutor kBulk;
extern const ExpertsExecutor kExperts;
extern const SlotsExecutor kSlots;
}  // namespace cuda

// Throws UNSUPPORTED where this build has none for such devices.
const BulkExecutor& bulk_executor_for(std::int32_t device_type);
const ExpertsExecutor& experts_executor_for(std::int32_t device_type);
const SlotsExecutor& slots_executor_for(std::int32_t device_type);

}  // namespace xd::ep
