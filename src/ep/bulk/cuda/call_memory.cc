#include "ep/bulk/cuda/call_memory.h"

#include <algorithm>

namespace xd::ep::cuda {
namespace {

using Claim = xd::cuda::KnownMemory::Claim;

using xd::cuda::claim;

// An output that the host may want to read.
Claim number(const Tensor& tensor) { return claim(tensor, true); }

// The claim ends with the size of the group's plans, since no kernel reads more of a plan.
Claim claim(const PlanBytes& plan, std::size_t most) {
  return {"plan", plan.data, std::min(plan.bytes, most)};
}

}  // namespace

void require_memory(const PrepareCall& c, std::size_t plan_bytes, xd::cuda::KnownMemory& known) {
  known.require({{"plan", c.plan, plan_bytes},
                 claim(c.topk_idx),
                 claim(c.replica_hint),
                 number(c.counts),
                 number(c.padded_counts),
                 number(c.offsets),
                 number(c.total),
                 number(c.rank_rows)});
}

void require_memory(const DispatchCall& c, std::size_t plan_bytes, xd::cuda::KnownMemory& known) {
  known.require({claim(c.plan, plan_bytes), claim(c.tokens), claim(c.scales), claim(c.topk_weights),
                 claim(c.recv_tokens), claim(c.recv_scales), claim(c.recv_weights),
                 claim(c.recv_topk_idx)});
}

void require_memory(const CombineCall& c, std::size_t plan_bytes, xd::cuda::KnownMemory& known) {
  known.require({claim(c.plan, plan_bytes), claim(c.expert_out), claim(c.weights), claim(c.out)});
}

void require_memory(const DispatchBwdCall& c, std::size_t plan_bytes,
                    xd::cuda::KnownMemory& known) {
  known.require({claim(c.plan, plan_bytes), claim(c.grad_recv_tokens), claim(c.grad_recv_weights),
                 claim(c.grad_tokens), claim(c.grad_topk_weights)});
}

void require_memory(const CombineBwdCall& c, std::size_t plan_bytes, xd::cuda::KnownMemory& known) {
  known.require({claim(c.plan, plan_bytes), claim(c.grad_out), claim(c.grad_out_scales),
                 claim(c.expert_out), claim(c.weights), claim(c.grad_expert_out),
                 claim(c.grad_expert_out_scales), claim(c.grad_weights)});
}

void require_memory(const RowExpertsCall& c, std::size_t plan_bytes, xd::cuda::KnownMemory& known) {
  known.require({claim(c.plan, plan_bytes), number(c.row_experts)});
}

void require_memory(const RoutingLayoutCall& c, xd::cuda::KnownMemory& known) {
  known.require({claim(c.topk_idx), number(c.rows_per_rank), number(c.rows_per_expert),
                 number(c.token_in_rank), number(c.bad_ids)});
}

}  // namespace xd::ep::cuda
