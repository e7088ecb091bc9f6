#include "group.h"

namespace xdpy {

namespace {

void prepare(Group& self, nb::handle topk_idx, std::uintptr_t plan, std::size_t plan_bytes,
             nb::handle counts, nb::handle padded_counts, nb::handle offsets, nb::handle total,
             nb::handle rank_rows, std::uintptr_t stream, std::int32_t alignment) {
  const DLDevice device = self.device();
  const Tensor topk_idx_tensor(topk_idx, "topk_idx", device);
  const Tensor counts_tensor(counts, "counts", device);
  const Tensor padded_tensor(padded_counts, "padded_counts", device);
  const Tensor offsets_tensor(offsets, "offsets", device);
  const Tensor total_tensor(total, "total", device);
  const Tensor rank_rows_tensor(rank_rows, "rank_rows", device);
  xd_ep_prepare_args args XD_EP_PREPARE_ARGS_INIT;
  args.topk_idx = topk_idx_tensor.get();
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.alignment = alignment;
  args.counts = counts_tensor.get();
  args.padded_counts = padded_tensor.get();
  args.offsets = offsets_tensor.get();
  args.total = total_tensor.get();
  args.rank_rows = rank_rows_tensor.get();
  self.call(XD_EP_PREPARE,
            [&](xd_ep_group* group) { return xd_ep_prepare(group, &args, stream_of(stream)); });
}

void dispatch(Group& self, std::uintptr_t plan, std::size_t plan_bytes, nb::handle tokens,
              nb::handle scales, nb::handle topk_weights, nb::handle recv_tokens,
              nb::handle recv_scales, nb::handle recv_weights, nb::handle recv_topk_idx,
              int quantise, std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor tokens_tensor(tokens, "tokens", device);
  const Tensor scales_tensor(scales, "scales", device);
  const Tensor weights_tensor(topk_weights, "topk_weights", device);
  const Tensor recv_tokens_tensor(recv_tokens, "recv_tokens", device);
  const Tensor recv_scales_tensor(recv_scales, "recv_scales", device);
  const Tensor recv_weights_tensor(recv_weights, "recv_weights", device);
  const Tensor recv_idx_tensor(recv_topk_idx, "recv_topk_idx", device);
  xd_ep_dispatch_args args XD_EP_DISPATCH_ARGS_INIT;
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.tokens = tokens_tensor.get();
  args.scales = scales_tensor.get();
  args.topk_weights = weights_tensor.get();
  args.recv_tokens = recv_tokens_tensor.get();
  args.recv_scales = recv_scales_tensor.get();
  args.recv_weights = recv_weights_tensor.get();
  args.recv_topk_idx = recv_idx_tensor.get();
  args.quantise = static_cast<xd_ep_quantise>(quantise);
  self.call(XD_EP_DISPATCH,
            [&](xd_ep_group* group) { return xd_ep_dispatch(group, &args, stream_of(stream)); });
}

void combine(Group& self, std::uintptr_t plan, std::size_t plan_bytes, nb::handle expert_out,
             nb::handle weights, nb::handle out, std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor expert_out_tensor(expert_out, "expert_out", device);
  const Tensor weights_tensor(weights, "weights", device);
  const Tensor out_tensor(out, "out", device);
  xd_ep_combine_args args XD_EP_COMBINE_ARGS_INIT;
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.expert_out = expert_out_tensor.get();
  args.weights = weights_tensor.get();
  args.out = out_tensor.get();
  self.call(XD_EP_COMBINE,
            [&](xd_ep_group* group) { return xd_ep_combine(group, &args, stream_of(stream)); });
}

void dispatch_bwd(Group& self, std::uintptr_t plan, std::size_t plan_bytes,
                  nb::handle grad_recv_tokens, nb::handle grad_recv_weights, nb::handle grad_tokens,
                  nb::handle grad_topk_weights, std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor recv_tokens_tensor(grad_recv_tokens, "grad_recv_tokens", device);
  const Tensor recv_weights_tensor(grad_recv_weights, "grad_recv_weights", device);
  const Tensor tokens_tensor(grad_tokens, "grad_tokens", device);
  const Tensor topk_weights_tensor(grad_topk_weights, "grad_topk_weights", device);
  xd_ep_dispatch_bwd_args args XD_EP_DISPATCH_BWD_ARGS_INIT;
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.grad_recv_tokens = recv_tokens_tensor.get();
  args.grad_recv_weights = recv_weights_tensor.get();
  args.grad_tokens = tokens_tensor.get();
  args.grad_topk_weights = topk_weights_tensor.get();
  self.call(XD_EP_DISPATCH_BWD, [&](xd_ep_group* group) {
    return xd_ep_dispatch_bwd(group, &args, stream_of(stream));
  });
}

void combine_bwd(Group& self, std::uintptr_t plan, std::size_t plan_bytes, nb::handle grad_out,
                 nb::handle expert_out, nb::handle weights, nb::handle grad_expert_out,
                 nb::handle grad_weights, nb::handle grad_out_scales,
                 nb::handle grad_expert_out_scales, std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor grad_out_tensor(grad_out, "grad_out", device);
  const Tensor expert_out_tensor(expert_out, "expert_out", device);
  const Tensor weights_tensor(weights, "weights", device);
  const Tensor grad_expert_out_tensor(grad_expert_out, "grad_expert_out", device);
  const Tensor grad_weights_tensor(grad_weights, "grad_weights", device);
  const Tensor scales_tensor(grad_out_scales, "grad_out_scales", device);
  const Tensor out_scales_tensor(grad_expert_out_scales, "grad_expert_out_scales", device);
  xd_ep_combine_bwd_args args XD_EP_COMBINE_BWD_ARGS_INIT;
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.grad_out = grad_out_tensor.get();
  args.expert_out = expert_out_tensor.get();
  args.weights = weights_tensor.get();
  args.grad_expert_out = grad_expert_out_tensor.get();
  args.grad_weights = grad_weights_tensor.get();
  args.grad_out_scales = scales_tensor.get();
  args.grad_expert_out_scales = out_scales_tensor.get();
  self.call(XD_EP_COMBINE_BWD,
            [&](xd_ep_group* group) { return xd_ep_combine_bwd(group, &args, stream_of(stream)); });
}

void row_experts(Group& self, std::uintptr_t plan, std::size_t plan_bytes, nb::handle row_experts,
                 std::uintptr_t stream) {
  const Tensor rows_tensor(row_experts, "row_experts", self.device());
  xd_ep_plan_row_experts_args args XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT;
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.row_experts = rows_tensor.get();
  self.call_local(
      [&](xd_ep_group* group) { return xd_ep_plan_row_experts(group, &args, stream_of(stream)); });
}

}  // namespace

void bind_group(nb::module_& module) {
  using namespace nb::literals;
  Group::bind(module, "Group")
      .def("prepare", &prepare, "topk_idx"_a, "plan_ptr"_a, "plan_bytes"_a, "counts"_a = nb::none(),
           "padded_counts"_a = nb::none(), "offsets"_a = nb::none(), "total"_a = nb::none(),
           "rank_rows"_a = nb::none(), "stream"_a = 0, "alignment"_a = 0)
      .def("dispatch", &dispatch, "plan_ptr"_a, "plan_bytes"_a, "tokens"_a, "scales"_a.none(),
           "topk_weights"_a.none(), "recv_tokens"_a, "recv_scales"_a.none(),
           "recv_weights"_a.none(), "recv_topk_idx"_a = nb::none(), "quantise"_a = 0,
           "stream"_a = 0)
      .def("combine", &combine, "plan_ptr"_a, "plan_bytes"_a, "expert_out"_a, "weights"_a.none(),
           "out"_a, "stream"_a = 0)
      .def("dispatch_bwd", &dispatch_bwd, "plan_ptr"_a, "plan_bytes"_a, "grad_recv_tokens"_a.none(),
           "grad_recv_weights"_a.none(), "grad_tokens"_a.none(), "grad_topk_weights"_a.none(),
           "stream"_a = 0)
      .def("combine_bwd", &combine_bwd, "plan_ptr"_a, "plan_bytes"_a, "grad_out"_a,
           "expert_out"_a.none(), "weights"_a.none(), "grad_expert_out"_a,
           "grad_weights"_a = nb::none(), "grad_out_scales"_a = nb::none(),
           "grad_expert_out_scales"_a = nb::none(), "stream"_a = 0)
      .def("row_experts", &row_experts, "plan_ptr"_a, "plan_bytes"_a, "row_experts"_a,
           "stream"_a = 0);
}

}  // namespace xdpy
