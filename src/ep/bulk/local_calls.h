// The arguments of local calls after their checks. ep/bulk/calls.h has the operations' arguments.
#pragma once

#include <crossdock/ep.h>

#include "base/tensor.h"
#include "ep/bulk/calls.h"
#include "ep/plan/expert_map.h"

namespace xd::ep {

struct RowExpertsCall {
  PlanBytes plan;
  Tensor row_experts;
};
// Where xd_ep_group_loads writes to.
Tensor read_loads(const DLTensor* loads, std::int32_t clear, const CallContext& context);

RowExpertsCall read_row_experts(const xd_ep_plan_row_experts_args* args,
                                const CallContext& context);

struct RoutingLayoutCall {
  ExpertTables expert_tables;
  Tensor topk_idx;
  Tensor rows_per_rank, rows_per_expert, token_in_rank, bad_ids;
};
RoutingLayoutCall read_routing_layout(const xd_ep_routing_layout_args* args, int ranks,
                                      DLDevice device);

}  // namespace xd::ep
