#include "ll_calls.h"

#include <algorithm>

namespace bench {
namespace {

xd_ll_config config_of(const Workload& w, const ComputeDevice& device) {
  xd_ll_config config = XD_LL_CONFIG_INIT;
  config.num_ranks = w.ranks;
  config.num_experts = w.experts;
  config.max_topk = w.topk;
  config.max_tokens_per_rank = std::max(w.tokens, 1);
  config.hidden = w.hidden;
  config.dtype = kBf16;
  config.device_type = device.dl().device_type;
  config.receive = w.receive == Receive::slots       ? XD_LL_SLOTS
                   : w.receive == Receive::by_expert ? XD_LL_BY_EXPERT
                                                     : XD_LL_BY_RANK;
  config.alignment = w.alignment;
  config.num_sms = w.sms;
  config.num_logical_experts = w.tables ? w.experts : 0;
  config.wire_formats = XD_EP_WIRE_BIT(XD_EP_WIRE_FP8_BLOCK128);  // no wire needs less memory
  return config;
}

std::size_t plan_bytes(const xd_ll_config& config) {
  std::size_t bytes = 0;
  ok(xd_ll_plan_size(&config, &bytes));
  return (bytes + 255) / 256 * 256;  // so that the next may lie behind it
}

std::int64_t most_rows(const xd_ll_config& config) {
  std::int64_t rows = 0;
  ok(xd_ll_recv_bound(&config, 0, &rows));
  return rows;
}

// Of received rows.
Tensor::Shape shape(const xd_ll_config& config, std::int64_t columns) {
  if (config.receive != XD_LL_SLOTS) return {most_rows(config), columns};
  return {config.num_experts / config.num_ranks,
          std::int64_t{config.num_ranks} * config.max_tokens_per_rank, columns};
}

}  // namespace

LlCalls::LlCalls(const Workload& w, const Rank& at, const EpInputs& inputs, int sets)
    : at_(at),
      config_(config_of(w, at.device)),
      recv_(nullptr, at.device, kBf16, shape(config_, w.hidden), sets, Pages::untouched),
      recv_fp8_(nullptr, at.device, kE4m3, shape(config_, w.hidden), 1, Pages::untouched),
      scales_(nullptr, at.device, kFloat, shape(config_, w.hidden / kScaleColumns), 1,
              Pages::untouched),
      counts_(nullptr, at.device, kInt32, {w.local_experts()}, sets),
      row_offsets_(nullptr, at.device, kInt64,
                   {(w.receive == Receive::by_rank ? w.ranks : w.local_experts()) + 1}),
      recv_topk_idx_(nullptr, at.device, kInt32,
                     {w.receive == Receive::by_rank ? most_rows(config_) : 0, w.topk}),
      out_(nullptr, at.device, kBf16, {w.tokens, w.hidden}, sets),
      plan_bytes_(plan_bytes(config_)),
      plans_(nullptr, at.device, plan_bytes_ * static_cast<std::size_t>(sets)) {
  xd_ll_group* group = nullptr;
  ok(xd_ll_group_create(at.comm, &config_, &group));
  group_.reset(group);
  dispatch_.tokens = inputs.tokens.dl();
  dispatch_.topk_idx = inputs.topk_idx.dl();
  if (w.receive != Receive::slots) dispatch_.row_offsets = row_offsets_.dl();
  if (w.receive == Receive::by_rank) dispatch_.recv_topk_idx = recv_topk_idx_.dl();
  dispatch_.plan_bytes = plan_bytes_;
  combine_.plan_bytes = plan_bytes_;
  use(0);
}

void LlCalls::use(int set) {
  dispatch_.recv_tokens = recv_.dl(set);
  dispatch_.counts = counts_.dl(set);
  dispatch_.plan = plans_.data() + plan_bytes_ * static_cast<std::size_t>(set);
  combine_.plan = dispatch_.plan;
  combine_.expert_out = recv_.dl(set);
  combine_.out = out_.dl(set);
}

void LlCalls::dispatch(xd_ll_phase phase, int set) {
  use(set);
  dispatch_.phase = phase;
  ok(xd_ll_dispatch(group_.get(), &dispatch_, at_.device.stream()));
}

void LlCalls::dispatch_fp8(xd_ll_phase phase) {
  xd_ll_dispatch_args args = dispatch_;
  args.phase = phase;
  args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
  args.recv_tokens = recv_fp8_.dl();
  args.recv_scales = scales_.dl();
  ok(xd_ll_dispatch(group_.get(), &args, at_.device.stream()));
}

void LlCalls::combine(xd_ll_phase phase, int set) {
  use(set);
  combine_.phase = phase;
  ok(xd_ll_combine(group_.get(), &combine_, at_.device.stream()));
}

void LlCalls::combine_fp8(xd_ll_phase phase) {
  xd_ll_combine_args args = combine_;
  args.phase = phase;
  args.wire = XD_EP_WIRE_FP8_BLOCK128;
  ok(xd_ll_combine(group_.get(), &args, at_.device.stream()));
}

void LlCalls::check_status() const {
  bench::check_status(at_.comm, group_.get(), xd_ll_group_status, xd_ll_status XD_LL_STATUS_INIT);
}

xd_ll_memory LlCalls::memory() const {
  xd_ll_memory memory = XD_LL_MEMORY_INIT;
  ok(xd_ll_group_memory(&config_, &memory));
  return memory;
}

}  // namespace bench
