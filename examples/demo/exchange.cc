#include "exchange.h"

#include <array>
#include <stdexcept>
#include <string>

namespace demo {
namespace {

// A DLPack view of a span, [rows, columns]; columns = 0: a vector.
class View {
 public:
  View(std::span<const float> data, int columns = 0)
      : View(data.data(), data.size(), columns, {kDLFloat, 32, 1}) {}
  View(std::span<const std::int32_t> data, int columns = 0)
      : View(data.data(), data.size(), columns, {kDLInt, 32, 1}) {}
  View(const View&) = delete;
  View& operator=(const View&) = delete;
  operator const DLTensor*() const { return &tensor_; }

 private:
  View(const void* data, std::size_t count, int columns, DLDataType type)
      : shape_{static_cast<std::int64_t>(count) / (columns == 0 ? 1 : columns), columns},
        // DLPack has no pointers to const; the operations say what they only read.
        tensor_{const_cast<void*>(data),
                {kDLCPU, 0},
                columns == 0 ? 1 : 2,
                type,
                shape_.data(),
                nullptr,
                0} {}

  std::array<std::int64_t, 2> shape_;
  DLTensor tensor_;
};

}  // namespace

void ok(xd_status status) {
  if (status == XD_SUCCESS) return;
  throw std::runtime_error(std::string(xd_status_name(status)) + ": " + xd_last_error());
}

Exchange::Exchange(Sizes sizes, std::size_t heap_bytes) : sizes_(sizes) {
  xd_comm_config config = XD_COMM_CONFIG_INIT;
  config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
  config.heap_bytes = heap_bytes;
  config.timeout_ms = 60000;
  config.name = "demo";
  xd_comm* comm = nullptr;
  ok(xd_comm_create(&config, &comm));
  comm_.reset(comm);

  xd_comm_info info = XD_COMM_INFO_INIT;
  ok(xd_comm_get_info(comm, &info));
  rank_ = info.rank;
  sizes_.ranks = info.num_ranks;

  xd_ep_config ep = XD_EP_CONFIG_INIT;
  ep.num_ranks = sizes_.ranks;
  ep.num_experts = sizes_.experts;
  ep.max_topk = sizes_.topk;
  ep.max_tokens_per_rank = sizes_.tokens;
  ep.hidden = sizes_.hidden;
  ep.dtype = {kDLFloat, 32, 1};
  ep.layout = XD_EP_EXPERT_MAJOR;
  xd_ep_group* group = nullptr;
  ok(xd_ep_group_create(comm, &ep, &group));
  group_.reset(group);

  std::int64_t rows = 0;
  ok(xd_ep_recv_bound(&ep, &rows));
  recv_rows_ = static_cast<std::size_t>(rows);
  std::size_t plan_bytes = 0;
  ok(xd_ep_plan_size(&ep, &plan_bytes));
  plan_.resize((plan_bytes + sizeof(PlanUnit) - 1) / sizeof(PlanUnit));
}

template <class Args>
Args Exchange::with_plan(Args args) {
  args.plan = plan_.data();
  args.plan_bytes = plan_.size() * sizeof(PlanUnit);
  return args;
}

void Exchange::prepare(std::span<const std::int32_t> ids, std::span<std::int32_t> counts,
                       std::span<std::int32_t> offsets) {
  const View ids_view(ids, sizes_.topk), counts_view(counts), offsets_view(offsets);
  auto args = with_plan(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
  args.topk_idx = ids_view;
  args.counts = counts_view;
  args.offsets = offsets_view;
  ok(xd_ep_prepare(group_.get(), &args, nullptr));
}

void Exchange::dispatch(std::span<const float> tokens, std::span<const float> weights,
                        std::span<float> recv_tokens, std::span<float> recv_weights) {
  const View tokens_view(tokens, sizes_.hidden), weights_view(weights, sizes_.topk);
  const View recv_view(recv_tokens, sizes_.hidden), recv_weights_view(recv_weights);
  auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
  args.tokens = tokens_view;
  args.topk_weights = weights_view;
  args.recv_tokens = recv_view;
  args.recv_weights = recv_weights_view;
  ok(xd_ep_dispatch(group_.get(), &args, nullptr));
}

void Exchange::combine(std::span<const float> expert_out, std::span<const float> recv_weights,
                       std::span<float> out) {
  const View expert_out_view(expert_out, sizes_.hidden), weights_view(recv_weights);
  const View out_view(out, sizes_.hidden);
  auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
  args.expert_out = expert_out_view;
  args.weights = weights_view;
  args.out = out_view;
  ok(xd_ep_combine(group_.get(), &args, nullptr));
}

void Exchange::combine_backward(std::span<const float> expert_out,
                                std::span<const float> recv_weights,
                                const CombineGradients& gradients) {
  const View grad_out_view(gradients.out, sizes_.hidden);
  const View expert_out_view(expert_out, sizes_.hidden), weights_view(recv_weights);
  const View grad_expert_view(gradients.expert_out, sizes_.hidden);
  const View grad_weights_view(gradients.recv_weights);
  auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
  args.grad_out = grad_out_view;
  args.expert_out = expert_out_view;
  args.weights = weights_view;
  args.grad_expert_out = grad_expert_view;
  args.grad_weights = grad_weights_view;
  ok(xd_ep_combine_bwd(group_.get(), &args, nullptr));
}

void Exchange::dispatch_backward(const DispatchGradients& gradients) {
  const View grad_recv_view(gradients.recv_tokens, sizes_.hidden);
  const View grad_recv_weights_view(gradients.recv_weights);
  const View grad_tokens_view(gradients.tokens, sizes_.hidden);
  const View grad_weights_view(gradients.weights, sizes_.topk);
  auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  args.grad_recv_tokens = grad_recv_view;
  args.grad_recv_weights = grad_recv_weights_view;
  args.grad_tokens = grad_tokens_view;
  args.grad_topk_weights = grad_weights_view;
  ok(xd_ep_dispatch_bwd(group_.get(), &args, nullptr));
}

}  // namespace demo
