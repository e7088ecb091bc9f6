#include "group.h"

namespace xdpy {

namespace {

void row_experts(Group& self, const nb::dict& fields) {
  const Given<xd_ep_plan_row_experts_args> args(fields, self.device());
  self.call_local(
      [&](xd_ep_group* group) { return xd_ep_plan_row_experts(group, args.get(), args.stream()); });
}

void loads(Group& self, nb::handle out, bool clear, std::uintptr_t stream) {
  const Tensor to(out, "loads", self.device());
  self.call_local([&](xd_ep_group* group) {
    return xd_ep_group_loads(group, to.get(), clear ? 1 : 0, stream_of(stream));
  });
}

void enter_view(Group& self, std::uintptr_t stream) {
  self.call(XD_EP_ENTER_VIEW,
            [&](xd_ep_group* group) { return xd_ep_group_enter_view(group, stream_of(stream)); });
}

// The fields of xd_moe_memory.
nb::dict moe_sizes(std::int32_t ffn, const nb::kwargs& options) {
  const Given<xd_ep_config> config(options);
  xd_moe_memory memory XD_MOE_MEMORY_INIT;
  check(xd_moe_sizes(config.get(), ffn, &memory));
  return fields_of(memory);
}

// The fields of xd_moe_overlap: parts, num_sms and predicted_ratio.
nb::dict moe_schedule(std::int32_t ffn, std::int32_t tokens, const nb::kwargs& options) {
  const Given<xd_ep_config> config(options);
  xd_moe_overlap overlap XD_MOE_OVERLAP_INIT;
  check(xd_moe_schedule(config.get(), ffn, tokens, &overlap));
  return fields_of(overlap);
}

}  // namespace

void bind_group(nb::module_& module) {
  using namespace nb::literals;
  Group::bind(module, "Group")
      .def("prepare", method<Group>(XD_EP_PREPARE, xd_ep_prepare), "fields"_a)
      .def("dispatch", method<Group>(XD_EP_DISPATCH, xd_ep_dispatch), "fields"_a)
      .def("combine", method<Group>(XD_EP_COMBINE, xd_ep_combine), "fields"_a)
      .def("dispatch_bwd", method<Group>(XD_EP_DISPATCH_BWD, xd_ep_dispatch_bwd), "fields"_a)
      .def("combine_bwd", method<Group>(XD_EP_COMBINE_BWD, xd_ep_combine_bwd), "fields"_a)
      .def("moe_forward", method<Group>(XD_EP_DISPATCH, xd_moe_forward), "fields"_a)
      .def("moe_backward", method<Group>(XD_EP_COMBINE_BWD, xd_moe_backward), "fields"_a)
      .def("row_experts", &row_experts, "fields"_a)
      .def("enter_view", &enter_view, "stream"_a = 0)
      .def("loads", &loads, "loads"_a, "clear"_a, "stream"_a = 0);
  module.def("moe_sizes", &moe_sizes, "ffn"_a, "options"_a);
  module.def("moe_schedule", &moe_schedule, "ffn"_a, "tokens"_a, "options"_a);
}

}  // namespace xdpy
