// The operations, masks and sizes of crossdock/low_latency.h.
#include "group.h"

namespace xdpy {
namespace {

void dispatch(LowLatencyGroup& self, int phase, nb::handle tokens, nb::handle topk_idx,
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
  xd_ll_dispatch_args args XD_LL_DISPATCH_ARGS_INIT;
  args.phase = static_cast<xd_ll_phase>(phase);
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
  self.call(XD_LL_DISPATCH,
            [&](xd_ll_group* group) { return xd_ll_dispatch(group, &args, stream_of(stream)); });
}

void combine(LowLatencyGroup& self, int phase, std::uintptr_t plan, std::size_t plan_bytes,
             nb::handle expert_out, nb::handle topk_weights, nb::handle out, nb::handle wait_ns,
             std::uintptr_t stream) {
  const DLDevice device = self.device();
  const Tensor expert_out_tensor(expert_out, "expert_out", device);
  const Tensor weights_tensor(topk_weights, "topk_weights", device);
  const Tensor out_tensor(out, "out", device);
  const Tensor wait_tensor(wait_ns, "wait_ns", device);
  xd_ll_combine_args args XD_LL_COMBINE_ARGS_INIT;
  args.phase = static_cast<xd_ll_phase>(phase);
  args.plan = pointer(plan);
  args.plan_bytes = plan_bytes;
  args.expert_out = expert_out_tensor.get();
  args.topk_weights = weights_tensor.get();
  args.out = out_tensor.get();
  args.wait_ns = wait_tensor.get();
  self.call(XD_LL_COMBINE,
            [&](xd_ll_group* group) { return xd_ll_combine(group, &args, stream_of(stream)); });
}

void mask_set(LowLatencyGroup& self, std::int32_t rank, std::int32_t masked,
              std::uintptr_t stream) {
  self.call_local(
      [&](xd_ll_group* group) { return xd_ll_mask_set(group, rank, masked, stream_of(stream)); });
}

void mask_get(LowLatencyGroup& self, nb::handle mask, std::uintptr_t stream) {
  const Tensor mask_tensor(mask, "mask", self.device());
  self.call_local([&](xd_ll_group* group) {
    return xd_ll_mask_get(group, mask_tensor.get(), stream_of(stream));
  });
}

void reset(LowLatencyGroup& self, std::uintptr_t stream) {
  self.call(XD_LL_RESET, [&](xd_ll_group* group) { return xd_ll_reset(group, stream_of(stream)); });
}

nb::dict group_memory(const nb::kwargs& options) {
  const LlGroupConfig given = ll_group_config(options);
  const xd_ll_config config = given.get();
  xd_ll_memory memory XD_LL_MEMORY_INIT;
  check(xd_ll_group_memory(&config, &memory));
  nb::dict sizes;
  sizes["symmetric_bytes"] = memory.symmetric_bytes;
  sizes["private_bytes"] = memory.private_bytes;
  return sizes;
}

nb::dict plan_info(std::uintptr_t plan, std::size_t plan_bytes) {
  xd_ll_plan_info info XD_LL_PLAN_INFO_INIT;
  check(xd_ll_plan_get_info(pointer(plan), plan_bytes, &info));
  nb::dict fields;
  fields["rank"] = info.rank;
  fields["num_ranks"] = info.num_ranks;
  fields["num_experts"] = info.num_experts;
  fields["num_tokens"] = info.num_tokens;
  fields["topk"] = info.topk;
  fields["recv_rows"] = info.recv_rows;
  fields["bad_ids"] = info.bad_ids;
  fields["bad_id_rank"] = info.bad_id_rank;
  fields["fingerprint"] = info.fingerprint;
  fields["epoch"] = info.epoch;
  return fields;
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  using namespace nb::literals;
  LowLatencyGroup::bind(module, "LowLatencyGroup")
      .def("dispatch", &dispatch, "phase"_a, "tokens"_a.none(), "topk_idx"_a.none(),
           "topk_weights"_a.none(), "quantise"_a, "plan_ptr"_a, "plan_bytes"_a,
           "recv_tokens"_a.none(), "recv_scales"_a.none(), "counts"_a.none(),
           "source_ranges"_a = nb::none(), "source_tokens"_a = nb::none(),
           "expert_load"_a = nb::none(), "wait_ns"_a = nb::none(), "stream"_a = 0)
      .def("combine", &combine, "phase"_a, "plan_ptr"_a, "plan_bytes"_a, "expert_out"_a.none(),
           "topk_weights"_a.none(), "out"_a.none(), "wait_ns"_a = nb::none(), "stream"_a = 0)
      .def("mask_set", &mask_set, "rank"_a, "masked"_a, "stream"_a = 0)
      .def("mask_get", &mask_get, "mask"_a, "stream"_a = 0)
      .def("reset", &reset, "stream"_a = 0);
  module.def("ll_local_experts", &local_experts<LowLatencyApi>, "rank"_a, "options"_a);
  module.def("ll_plan_size", &plan_size<LowLatencyApi>);
  module.def("ll_group_memory", &group_memory);
  module.def("ll_plan_info", &plan_info, "plan_ptr"_a, "plan_bytes"_a);
}

}  // namespace xdpy
