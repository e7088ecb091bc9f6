#include "ep_calls.h"

#include <algorithm>

#include "group_config.h"

namespace bench {

EpCalls::EpCalls(const Workload& w, const Traffic& traffic, int rank, xd_comm* comm, bool staged)
    : w_(w),
      traffic_(traffic),
      topk_idx_(nullptr, {kDLInt, 32, 1}, {w.tokens, w.topk}),
      tokens_(staged ? nullptr : comm, payload_type(w.element), {w.tokens, w.hidden}),
      out_(staged ? nullptr : comm, payload_type(w.element), {w.tokens, w.hidden}),
      recv_(staged ? nullptr : comm, payload_type(w.element), {traffic.recv_capacity, w.hidden}) {
  std::copy(traffic.choices.begin(), traffic.choices.end(),
            static_cast<std::int32_t*>(topk_idx_.data()));
  fill_tokens(w, rank, tokens_.data());
  const xd_ep_config config = group_config(w, traffic, payload_type(w.element), staged);
  xd_ep_group* group = nullptr;
  ok(xd_ep_group_create(comm, &config, &group));
  group_.reset(group);
  std::size_t plan_bytes = 0;
  ok(xd_ep_plan_size(&config, &plan_bytes));
  plan_.resize((plan_bytes + sizeof(PlanUnit) - 1) / sizeof(PlanUnit));
}

std::size_t EpCalls::heap_bytes(const Workload& w, const Traffic& traffic, bool staged) {
  if (staged) return 0;
  return static_cast<std::size_t>(std::int64_t{2} * w.tokens + traffic.recv_capacity) *
         w.row_bytes();
}

// Fills in what all args structs have in common.
template <class Args>
Args EpCalls::with_plan(Args args) {
  args.plan = plan_.data();
  args.plan_bytes = plan_.size() * sizeof(PlanUnit);
  return args;
}

void EpCalls::prepare() {
  xd_ep_prepare_args args = with_plan(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
  args.topk_idx = topk_idx_.dl();
  ok(xd_ep_prepare(group_.get(), &args, nullptr));
}

void EpCalls::dispatch() {
  auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
  args.tokens = tokens_.dl();
  args.recv_tokens = recv_.dl();
  ok(xd_ep_dispatch(group_.get(), &args, nullptr));
}

void EpCalls::combine() {
  auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
  args.expert_out = recv_.dl();
  args.out = out_.dl();
  ok(xd_ep_combine(group_.get(), &args, nullptr));
}

void EpCalls::dispatch_bwd() {
  auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  args.grad_recv_tokens = recv_.dl();
  args.grad_tokens = out_.dl();
  ok(xd_ep_dispatch_bwd(group_.get(), &args, nullptr));
}

void EpCalls::combine_bwd() {
  auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
  args.grad_out = tokens_.dl();
  args.grad_expert_out = recv_.dl();
  ok(xd_ep_combine_bwd(group_.get(), &args, nullptr));
}

std::uint64_t EpCalls::recv_checksum() const {
  return checksum(recv_.data(), static_cast<std::size_t>(traffic_.recv_rows) * w_.row_bytes(), 1);
}

std::uint64_t EpCalls::out_checksum() const {
  return checksum(out_.data(), static_cast<std::size_t>(w_.tokens) * w_.row_bytes(), 1);
}

}  // namespace bench
