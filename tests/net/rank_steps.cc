#include "net/rank_steps.h"

#include <cstdint>
#include <vector>

namespace xd::test {
namespace {

constexpr int kHidden = 256, kMostTokens = 40, kTopk = 2;

DLTensor tensor_of(void* data, DLDataType type, std::int64_t* shape, int ndim) {
  return {.data = data,
          .device = {kDLCPU, 0},
          .ndim = ndim,
          .dtype = type,
          .shape = shape,
          .strides = nullptr,
          .byte_offset = 0};
}

class Steps {
 public:
  Steps(xd_comm* comm, int rank, int num_ranks)
      : comm_(comm),
        rank_(rank),
        num_ranks_(num_ranks),
        rows_(std::int64_t{num_ranks} * kMostTokens * kTopk) {}
  ~Steps() { xd_ep_group_destroy(group_); }
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  std::string run(int count) {
    if (!good(make())) return failure_;
    for (int step = 0; step < count; ++step)
      if (!good(forward(step)) || !good(check(step, out_)) || !good(backward(step)) ||
          !good(check(step, out_)))
        return failure_ + " in step " + std::to_string(step);
    return "fine";
  }

 private:
  static std::size_t element(int token, int column) {
    return static_cast<std::size_t>(token) * kHidden + static_cast<std::size_t>(column);
  }
  bool good(const std::string& text) {
    failure_ = text;
    return text.empty();
  }
  static std::string outcome(xd_status status) {
    if (status == XD_SUCCESS) return "";
    return std::string(xd_status_name(status)) + " " + xd_last_error();
  }

  std::string make() {
    xd_ep_config config = XD_EP_CONFIG_INIT;
    config.num_ranks = num_ranks_;
    config.num_experts = 2 * num_ranks_;
    config.max_topk = kTopk;
    config.hidden = kHidden;
    config.dtype = {kDLFloat, 32, 1};
    config.max_tokens_per_rank = kMostTokens;
    std::size_t bytes = 0;
    if (const xd_status status = xd_ep_plan_size(&config, &bytes); status != XD_SUCCESS)
      return outcome(status);
    plan_.resize(bytes);
    return outcome(xd_ep_group_create(comm_, &config, &group_));
  }

  int tokens(int step) const { return (7 * step + 13 * rank_) % (kMostTokens + 1); }
  float value(int step, int token, int column) const {
    return static_cast<float>((step * 31 + rank_ * 101 + token * 7 + column) % 4096);
  }

  // Both choices of a token are different experts, mostly of two ranks. So the sum over its rows is
  // twice the token, there and back.
  std::string forward(int step) {
    const std::int64_t count = tokens(step);
    std::vector<std::int32_t> ids;
    in_.assign(static_cast<std::size_t>(count * kHidden), 0);
    out_.assign(in_.size(), -1);
    for (int t = 0; t < count; ++t) {
      const int first = (step + rank_ + 3 * t) % (2 * num_ranks_);
      ids.push_back(first);
      ids.push_back((first + 1 + t % (2 * num_ranks_ - 1)) % (2 * num_ranks_));
      for (int c = 0; c < kHidden; ++c) in_[element(t, c)] = value(step, t, c);
    }
    std::int64_t ids_shape[] = {count, kTopk};
    const DLTensor topk_idx = tensor_of(ids.data(), {kDLInt, 32, 1}, ids_shape, 2);
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = &topk_idx;
    args.plan = plan_.data();
    args.plan_bytes = plan_.size();
    if (const auto status = xd_ep_prepare(group_, &args, nullptr); status != XD_SUCCESS)
      return outcome(status);
    received_.assign(static_cast<std::size_t>(rows_ * kHidden), 0);
    xd_ep_dispatch_args to = XD_EP_DISPATCH_ARGS_INIT;
    xd_ep_combine_args back = XD_EP_COMBINE_ARGS_INIT;
    return there_and_back(to, &xd_ep_dispatch_args::tokens, &xd_ep_dispatch_args::recv_tokens,
                          xd_ep_dispatch, back, &xd_ep_combine_args::expert_out,
                          &xd_ep_combine_args::out, xd_ep_combine);
  }
  std::string backward(int) {
    out_.assign(in_.size(), -1);
    xd_ep_combine_bwd_args to = XD_EP_COMBINE_BWD_ARGS_INIT;
    xd_ep_dispatch_bwd_args back = XD_EP_DISPATCH_BWD_ARGS_INIT;
    return there_and_back(to, &xd_ep_combine_bwd_args::grad_out,
                          &xd_ep_combine_bwd_args::grad_expert_out, xd_ep_combine_bwd, back,
                          &xd_ep_dispatch_bwd_args::grad_recv_tokens,
                          &xd_ep_dispatch_bwd_args::grad_tokens, xd_ep_dispatch_bwd);
  }

  // One operation brings rows to their ranks, the other their sums home.
  template <class To, class Back>
  std::string there_and_back(To& to, const DLTensor* To::*from, const DLTensor* To::*rows,
                             xd_status (*send)(xd_ep_group*, const To*, xd_stream), Back& back,
                             const DLTensor* Back::*rows_back, const DLTensor* Back::*sums,
                             xd_status (*sum)(xd_ep_group*, const Back*, xd_stream)) {
    constexpr DLDataType kFloat{kDLFloat, 32, 1};
    std::int64_t token_shape[] = {static_cast<std::int64_t>(in_.size()) / kHidden, kHidden};
    std::int64_t row_shape[] = {rows_, kHidden};
    const DLTensor in = tensor_of(in_.data(), kFloat, token_shape, 2);
    const DLTensor out = tensor_of(out_.data(), kFloat, token_shape, 2);
    const DLTensor received = tensor_of(received_.data(), kFloat, row_shape, 2);
    to.*from = &in;
    to.*rows = back.*rows_back = &received;
    back.*sums = &out;
    to.plan = back.plan = plan_.data();
    to.plan_bytes = back.plan_bytes = plan_.size();
    if (const auto status = send(group_, &to, nullptr); status != XD_SUCCESS)
      return outcome(status);
    return outcome(sum(group_, &back, nullptr));
  }

  std::string check(int step, const std::vector<float>& sums) const {
    for (int t = 0; t < tokens(step); ++t)
      for (int c = 0; c < kHidden; ++c) {
        const float got = sums[element(t, c)];
        if (got == 2 * value(step, t, c)) continue;
        return "token " + std::to_string(t) + " column " + std::to_string(c) + " is " +
               std::to_string(got) + ", expected " + std::to_string(2 * value(step, t, c));
      }
    return "";
  }

  xd_comm* const comm_;
  const int rank_, num_ranks_;
  const std::int64_t rows_;
  xd_ep_group* group_ = nullptr;
  std::vector<std::byte> plan_;
  std::vector<float> in_, out_, received_;
  std::string failure_;
};

}  // namespace

std::string make_steps(xd_comm* comm, int rank, int num_ranks, int count) {
  return Steps(comm, rank, num_ranks).run(count);
}

}  // namespace xd::test
