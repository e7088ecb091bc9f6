#include "group.h"

namespace xdpy {

namespace {

void row_experts(Group& self, const nb::dict& fields) {
  const Given<xd_ep_plan_row_experts_args> args(fields, self.device());
  self.call_local(
      [&](xd_ep_group* group) { return xd_ep_plan_row_experts(group, args.get(), args.stream()); });
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
      .def("row_experts", &row_experts, "fields"_a);
}

}  // namespace xdpy
