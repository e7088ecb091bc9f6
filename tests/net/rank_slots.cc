#include <crossdock/low_latency.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "net/rank_steps.h"

namespace xd::test {
namespace {

constexpr int kHidden = 512, kMostTokens = 24, kTopk = 2;
constexpr DLDataType kFloat{kDLFloat, 32, 1};

struct Array {
  std::vector<std::int64_t> shape;
  DLTensor tensor;
  Array(void* data, DLDataType type, std::vector<std::int64_t> sizes) : shape(std::move(sizes)) {
    tensor = {.data = data,
              .device = {kDLCPU, 0},
              .ndim = static_cast<std::int32_t>(shape.size()),
              .dtype = type,
              .shape = shape.data(),
              .strides = nullptr,
              .byte_offset = 0};
  }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
};

std::string outcome(xd_status status) {
  if (status == XD_SUCCESS) return "";
  return std::string(xd_status_name(status)) + " " + xd_last_error();
}

// One batch. Both choices of a token are different experts, which give back what they get: so its
// sum is twice the token.
class SlotStep {
 public:
  SlotStep(int rank, int num_ranks, int step)
      : tokens_((5 * step + 7 * rank) % (kMostTokens + 1)), base_(step * 31 + rank * 101) {
    const int experts = 2 * num_ranks;
    for (int t = 0; t < tokens_; ++t) {
      const int first = (step + rank + 3 * t) % experts;
      ids_.push_back(first);
      ids_.push_back((first + 1 + t % (experts - 1)) % experts);
      for (int c = 0; c < kHidden; ++c) in_.push_back(value(t, c));
    }
    out_.assign(in_.size(), -1);
  }

  std::string run(xd_ep_group* group, std::vector<std::byte>& plan, std::vector<float>& slots) {
    const auto rows = static_cast<std::int64_t>(slots.size()) / (std::int64_t{2} * kHidden);
    const Array ids(ids_.data(), {kDLInt, 32, 1}, {tokens_, kTopk});
    const Array in(in_.data(), kFloat, {tokens_, kHidden});
    const Array received(slots.data(), kFloat, {2, rows, kHidden});
    const Array counts(counts_, {kDLInt, 32, 1}, {2});
    const Array out(out_.data(), kFloat, {tokens_, kHidden});
    xd_ep_ll_dispatch_args there = XD_EP_LL_DISPATCH_ARGS_INIT;
    xd_ep_ll_combine_args back = XD_EP_LL_COMBINE_ARGS_INIT;
    there.tokens = &in.tensor;
    there.topk_idx = &ids.tensor;
    there.recv_tokens = back.expert_out = &received.tensor;
    there.counts = &counts.tensor;
    back.out = &out.tensor;
    there.plan = plan.data();
    back.plan = plan.data();
    there.plan_bytes = back.plan_bytes = plan.size();
    for (const xd_ep_phase phase : {XD_EP_PHASE_SEND, XD_EP_PHASE_RECEIVE}) {
      there.phase = phase;
      if (const auto status = xd_ep_ll_dispatch(group, &there, nullptr); status != XD_SUCCESS)
        return outcome(status);
    }
    if (const auto status = xd_ep_ll_combine(group, &back, nullptr); status != XD_SUCCESS)
      return outcome(status);
    return check();
  }

 private:
  float value(int token, int column) const {
    return static_cast<float>((base_ + token * 7 + column) % 4096);
  }
  std::string check() const {
    for (std::size_t i = 0; i < out_.size(); ++i) {
      if (out_[i] == 2 * in_[i]) continue;
      return "element " + std::to_string(i) + " is " + std::to_string(out_[i]) + ", expected " +
             std::to_string(2 * in_[i]);
    }
    return "";
  }

  const int tokens_, base_;
  std::vector<std::int32_t> ids_;
  std::vector<float> in_, out_;
  std::int32_t counts_[2] = {};
};

}  // namespace

std::string make_slot_steps(xd_comm* comm, int rank, int num_ranks, int count) {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.layout = XD_EP_EXPERT_SLOTS;
  config.num_experts = 2 * num_ranks;
  config.max_topk = kTopk;
  config.hidden = kHidden;
  config.dtype = kFloat;
  config.max_tokens_per_rank = kMostTokens;
  xd_ep_group* group = nullptr;
  std::string wrong = outcome(xd_ep_group_create(comm, &config, &group));
  std::size_t bytes = 0;
  if (wrong.empty()) wrong = outcome(xd_ep_plan_size(&config, &bytes));
  std::vector<std::byte> plan(bytes);
  std::vector<float> slots(std::size_t{2} * kHidden * kMostTokens *
                           static_cast<std::size_t>(num_ranks));
  for (int step = 0; step < count && wrong.empty(); ++step) {
    wrong = SlotStep(rank, num_ranks, step).run(group, plan, slots);
    if (!wrong.empty()) wrong += " in step " + std::to_string(step);
  }
  xd_ep_group_destroy(group);
  return wrong.empty() ? "fine" : wrong;
}

}  // namespace xd::test
