// The operations and masks of crossdock/low_latency.h as methods of Group.
#include <crossdock/crossdock.h>

#include "arguments.h"
#include "group.h"

namespace xdpy {
namespace {

void ll_dispatch(Group& self, int phase, nb::handle tokens, nb::handle topk_idx,
                 nb::handle topk_weights, int quantise, std::uintptr_t plan, std::size_t plan_bytes,
                 nb::handle recv_tokens, nb::handle recv_scales, nb::handle counts,
                 nb::handle source_ranges, nb::handle source_tokens, nb::handle expert_load,
                 nb::handle wait_ns, std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor tokens_tensor(tokens, "tokens", device);
  const Tensor topk_idx_tensor(topk_idx, "topk_idx", device);
  const Tensor weights_tensor(topk_weights, "topk_weights", device);
  const Tensor recv_tokens_tensor(recv_tokens, "recv_tokens", device);
  const Tensor recv_scales_tensor(recv_scales, "recv_scales", device);
  const Tensor counts_tensor(counts, "counts", device);
  const Tensor ranges_tensor(source_ranges, "source_ranges", device);
  const Tensor sources_tensor(source_tokens, "source_tokens", device);
  const Tensor load_tensor(expert_load, "expert_load", device);
  const Tensor wait_tensor(wait_ns, "wait_ns", device);
  xd_ep_ll_dispatch_args args XD_EP_LL_DISPATCH_ARGS_INIT;
  args.phase = static_cast<xd_ep_phase>(phase);
  args.tokens = tokens_tensor.get();
  args.topk_idx = topk_idx_tensor.get();
  args.topk_weights = weights_tensor.get();
  args.quantise = static_cast<xd_ep_quantise>(quantise);
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.recv_tokens = recv_tokens_tensor.get();
  args.recv_scales = recv_scales_tensor.get();
  args.counts = counts_tensor.get();
  args.source_ranges = ranges_tensor.get();
  args.source_tokens = sources_tensor.get();
  args.expert_load = load_tensor.get();
  args.wait_ns = wait_tensor.get();
  self.call(XD_EP_LL_DISPATCH,
            [&](xd_ep_group* group) { return xd_ep_ll_dispatch(group, &args, stream_of(stream)); });
}

void ll_combine(Group& self, int phase, std::uintptr_t plan, std::size_t plan_bytes,
                nb::handle expert_out, nb::handle topk_weights, nb::handle out, nb::handle wait_ns,
                std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor expert_out_tensor(expert_out, "expert_out", device);
  const Tensor weights_tensor(topk_weights, "topk_weights", device);
  const Tensor out_tensor(out, "out", device);
  const Tensor wait_tensor(wait_ns, "wait_ns", device);
  xd_ep_ll_combine_args args XD_EP_LL_COMBINE_ARGS_INIT;
  args.phase = static_cast<xd_ep_phase>(phase);
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.expert_out = expert_out_tensor.get();
  args.topk_weights = weights_tensor.get();
  args.out = out_tensor.get();
  args.wait_ns = wait_tensor.get();
  self.call(XD_EP_LL_COMBINE,
            [&](xd_ep_group* group) { return xd_ep_ll_combine(group, &args, stream_of(stream)); });
}

void ll_mask_set(Group& self, std::int32_t rank, std::int32_t masked, std::uintptr_t stream) {
  self.call_local([&](xd_ep_group* group) {
    return xd_ep_ll_mask_set(group, rank, masked, stream_of(stream));
  });
}

void ll_mask_get(Group& self, nb::handle mask, std::uintptr_t stream) {
  const Tensor mask_tensor(mask, "mask", self.device());
  self.call_local([&](xd_ep_group* group) {
    return xd_ep_ll_mask_get(group, mask_tensor.get(), stream_of(stream));
  });
}

void ll_reset(Group& self, std::uintptr_t stream) {
  self.call(XD_EP_LL_RESET,
            [&](xd_ep_group* group) { return xd_ep_ll_reset(group, stream_of(stream)); });
}

}  // namespace

void bind_low_latency(nb::class_<Group>& group) {
  using namespace nb::literals;
  group
      .def("ll_dispatch", &ll_dispatch, "phase"_a, "tokens"_a.none(), "topk_idx"_a.none(),
           "topk_weights"_a.none(), "quantise"_a, "plan_ptr"_a, "plan_bytes"_a,
           "recv_tokens"_a.none(), "recv_scales"_a.none(), "counts"_a.none(),
           "source_ranges"_a = nb::none(), "source_tokens"_a = nb::none(),
           "expert_load"_a = nb::none(), "wait_ns"_a = nb::none(), "stream"_a = 0)
      .def("ll_combine", &ll_combine, "phase"_a, "plan_ptr"_a, "plan_bytes"_a,
           "expert_out"_a.none(), "topk_weights"_a.none(), "out"_a.none(), "wait_ns"_a = nb::none(),
           "stream"_a = 0)
      .def("ll_mask_set", &ll_mask_set, "rank"_a, "masked"_a, "stream"_a = 0)
      .def("ll_mask_get", &ll_mask_get, "mask"_a, "stream"_a = 0)
      .def("ll_reset", &ll_reset, "stream"_a = 0);
}

}  // namespace xdpy
