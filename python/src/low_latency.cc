// The operations, masks and sizes of crossdock/low_latency.h.
#include "group.h"

namespace xdpy {
namespace {

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
  const Given<xd_ll_config> config(options);
  xd_ll_memory memory XD_LL_MEMORY_INIT;
  check(xd_ll_group_memory(config.get(), &memory));
  return fields_of(memory);
}

std::int64_t recv_bound(std::int32_t max_tokens, const nb::kwargs& options) {
  const Given<xd_ll_config> config(options);
  std::int64_t rows = 0;
  check(xd_ll_recv_bound(config.get(), max_tokens, &rows));
  return rows;
}

nb::dict plan_info(std::uintptr_t plan, std::size_t plan_bytes) {
  xd_ll_plan_info info XD_LL_PLAN_INFO_INIT;
  check(xd_ll_plan_get_info(pointer(plan), plan_bytes, &info));
  return fields_of(info);
}

}  // namespace

void bind_low_latency(nb::module_& module) {
  using namespace nb::literals;
  LowLatencyGroup::bind(module, "LowLatencyGroup")
      .def("dispatch", method<LowLatencyGroup>(XD_LL_DISPATCH, xd_ll_dispatch), "fields"_a)
      .def("combine", method<LowLatencyGroup>(XD_LL_COMBINE, xd_ll_combine), "fields"_a)
      .def("fault_word", &LowLatencyGroup::fault_word)
      .def("mask_set", &mask_set, "rank"_a, "masked"_a, "stream"_a = 0)
      .def("mask_get", &mask_get, "mask"_a, "stream"_a = 0)
      .def("reset", &reset, "stream"_a = 0);
  module.def("ll_local_experts", &local_experts<LowLatencyApi>, "rank"_a, "options"_a);
  module.def("ll_plan_size", &plan_size<LowLatencyApi>);
  module.def("ll_recv_bound", &recv_bound, "max_tokens"_a, "options"_a);
  module.def("ll_group_memory", &group_memory);
  module.def("ll_plan_info", &plan_info, "plan_ptr"_a, "plan_bytes"_a);
}

}  // namespace xdpy
