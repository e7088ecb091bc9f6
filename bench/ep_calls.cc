#include "ep_calls.h"

#include <algorithm>
#include <vector>

namespace bench {
namespace {

DLDataType recv_type(const Workload& w) { return w.is_fp8() ? kE4m3 : payload_type(w.element); }

std::int64_t scale_columns(const Workload& w) { return w.is_fp8() ? w.hidden / kScaleColumns : 0; }

Tensor::Shape token_shape(const Workload& w) { return {w.tokens, w.hidden}; }
Tensor::Shape scale_shape(const Workload& w) {
  return {w.element == Element::fp8 ? w.tokens : 0, scale_columns(w)};
}
Tensor::Shape recv_shape(const Workload& w, const Traffic& traffic) {
  return {traffic.recv_capacity, w.hidden};
}
Tensor::Shape recv_scale_shape(const Workload& w, const Traffic& traffic) {
  return {traffic.recv_capacity, scale_columns(w)};
}
Tensor::Shape topk_weight_shape(const Workload& w) { return {w.weighted ? w.tokens : 0, w.topk}; }
Tensor::Shape recv_weight_shape(const Workload& w, const Traffic& traffic) {
  const std::int64_t rows = w.weighted ? traffic.recv_capacity : 0;
  return w.layout == Layout::expert ? Tensor::Shape{rows} : Tensor::Shape{rows, w.topk};
}
// Of the gradients of a weighted combine, and of its weights.
Tensor::Shape scaled_shape(const Workload& w, const Traffic& traffic) {
  return {w.is_scaled() ? traffic.recv_capacity : 0, w.hidden};
}
Tensor::Shape grad_weight_shape(const Workload& w, const Traffic& traffic) {
  return {w.is_scaled() ? traffic.recv_capacity : 0};
}

// Between the plans of sets.
std::size_t plan_stride(std::size_t bytes) { return (bytes + 255) / 256 * 256; }

}  // namespace

EpInputs::EpInputs(const Workload& w, const Traffic& traffic, xd_comm* symmetric_in,
                   const ComputeDevice& device, int copies)
    : topk_idx(nullptr, device, kInt32, {w.tokens, w.topk}),
      tokens(symmetric_in, device, payload_type(w.element), token_shape(w), copies),
      scales(symmetric_in, device, kFloat, scale_shape(w), copies),
      topk_weights(nullptr, device, kFloat, topk_weight_shape(w)) {
  device.copy(topk_idx.data(), traffic.choices.data(), topk_idx.bytes());
  std::vector<float> weights;
  for (std::int64_t i = 0; i < topk_weights.rows() * w.topk; ++i) {
    weights.push_back(static_cast<float>(Workload::weight_of(static_cast<int>(i % w.topk))));
  }
  if (w.weighted) device.copy(topk_weights.data(), weights.data(), topk_weights.bytes());
}

EpCalls::EpCalls(const Workload& w, const Traffic& traffic, const EpInputs& inputs, xd_comm* comm,
                 const ComputeDevice& device, bool staged, int recv_copies, int sets)
    : w_(w),
      traffic_(traffic),
      in_(inputs),
      comm_(comm),
      device_(device),
      staged_(staged),
      recv_(staged ? nullptr : comm, device, recv_type(w), recv_shape(w, traffic), recv_copies),
      recv_scales_(staged ? nullptr : comm, device, kFloat, recv_scale_shape(w, traffic),
                   recv_copies),
      out_(staged ? nullptr : comm, device, payload_type(w.element), token_shape(w), sets),
      recv_weights_(staged ? nullptr : comm, device, kFloat, recv_weight_shape(w, traffic)),
      grad_expert_out_(staged ? nullptr : comm, device, recv_type(w), scaled_shape(w, traffic),
                       recv_copies),
      grad_weights_(staged ? nullptr : comm, device, kFloat, grad_weight_shape(w, traffic)),
      grad_topk_weights_(nullptr, device, kFloat, topk_weight_shape(w)) {}

std::size_t EpCalls::heap_bytes(const Workload& w, const Traffic& traffic, int token_copies,
                                int recv_copies, int sets) {
  return Tensor::bytes(payload_type(w.element), token_shape(w), token_copies) +
         Tensor::bytes(payload_type(w.element), token_shape(w), sets) +
         Tensor::bytes(kFloat, scale_shape(w), token_copies) +
         Tensor::bytes(recv_type(w), recv_shape(w, traffic), recv_copies) +
         Tensor::bytes(kFloat, recv_scale_shape(w, traffic), recv_copies) +
         Tensor::bytes(kFloat, recv_weight_shape(w, traffic), 1) +
         Tensor::bytes(recv_type(w), scaled_shape(w, traffic), recv_copies) +
         Tensor::bytes(kFloat, grad_weight_shape(w, traffic), 1);
}

void EpCalls::open(int num_sms) {
  group_.reset();  // frees its budget before the next group asks for one
  ok(xd_comm_barrier(comm_));
  config_.num_ranks = w_.ranks;
  config_.num_experts = w_.experts;
  config_.max_topk = w_.topk;
  config_.max_tokens_per_rank = std::max(w_.tokens, 1);
  config_.hidden = w_.hidden;
  config_.dtype = payload_type(w_.element);
  config_.layout = w_.layout == Layout::expert ? XD_EP_EXPERT_MAJOR : XD_EP_RANK_MAJOR;
  config_.alignment = w_.alignment;
  config_.recv_capacity = traffic_.recv_capacity;
  config_.staging = staged_ ? XD_EP_STAGING_AUTO : XD_EP_STAGING_NONE;
  config_.max_scale_bytes = static_cast<std::int32_t>(scale_columns(w_) * kFloat.bits / 8);
  config_.num_sms = num_sms;
  config_.num_logical_experts = w_.tables ? w_.experts : 0;
  config_.wire_formats = XD_EP_WIRE_BIT(w_.combine_wire);
  config_.device_type = device_.dl().device_type;
  xd_ep_group* group = nullptr;
  ok(xd_ep_group_create(comm_, &config_, &group));
  group_.reset(group);
  ok(xd_ep_plan_size(&config_, &plan_bytes_));
  plans_.emplace(nullptr, device_,
                 plan_stride(plan_bytes_) * static_cast<std::size_t>(out_.copies()));
}

xd_ep_memory EpCalls::group_memory() const {
  xd_ep_memory memory = XD_EP_MEMORY_INIT;
  ok(xd_ep_group_memory(&config_, &memory));
  return memory;
}

std::size_t EpCalls::recv_bytes() const {
  return static_cast<std::size_t>(traffic_.recv_rows) * w_.row_bytes();
}

void EpCalls::call(Operation operation, int copy, int set) {
  set_ = set;
  switch (operation) {
    case Operation::prepare:
      return prepare();
    case Operation::dispatch:
      return dispatch(copy);
    case Operation::combine:
      return combine(copy);
    case Operation::dispatch_bwd:
      return dispatch_bwd(copy);
    case Operation::combine_bwd:
      return combine_bwd(copy);
  }
}

// Fills in what all args structs have in common.
template <class Args>
Args EpCalls::with_plan(Args args) const {
  args.plan = plans_->data() + plan_stride(plan_bytes_) * static_cast<std::size_t>(set_);
  args.plan_bytes = plan_bytes_;
  return args;
}

void EpCalls::prepare() {
  auto args = with_plan(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
  args.topk_idx = in_.topk_idx.dl();
  ok(xd_ep_prepare(group_.get(), &args, device_.stream()));
}

void EpCalls::dispatch(int copy) {
  auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
  args.tokens = in_.tokens.dl(copy);
  args.recv_tokens = recv_.dl(copy);
  if (w_.element == Element::fp8) args.scales = in_.scales.dl(copy);
  if (w_.is_fp8()) args.recv_scales = recv_scales_.dl(copy);
  if (w_.element == Element::bf16_to_fp8) args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
  if (w_.weighted) {
    args.topk_weights = in_.topk_weights.dl();
    args.recv_weights = recv_weights_.dl();
  }
  ok(xd_ep_dispatch(group_.get(), &args, device_.stream()));
}

void EpCalls::combine(int copy) {
  auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
  args.expert_out = recv_.dl(copy);
  if (w_.is_scaled()) args.weights = recv_weights_.dl();
  args.out = out_.dl(set_);
  args.wire = w_.combine_wire;
  ok(xd_ep_combine(group_.get(), &args, device_.stream()));
}

void EpCalls::dispatch_bwd(int copy) {
  auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  args.grad_recv_tokens = recv_.dl(copy);
  args.grad_tokens = out_.dl(set_);
  // The weights stand for gradients of their own.
  if (w_.weighted) {
    args.grad_recv_weights = recv_weights_.dl();
    args.grad_topk_weights = grad_topk_weights_.dl();
  }
  ok(xd_ep_dispatch_bwd(group_.get(), &args, device_.stream()));
}

void EpCalls::combine_bwd(int copy) {
  auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
  args.grad_out = in_.tokens.dl(copy);
  args.grad_expert_out = received_by(Operation::combine_bwd).dl(copy);
  if (w_.is_scaled()) {
    args.expert_out = recv_.dl(copy);
    args.weights = recv_weights_.dl();
    args.grad_weights = grad_weights_.dl();
  }
  ok(xd_ep_combine_bwd(group_.get(), &args, device_.stream()));
}

}  // namespace bench
