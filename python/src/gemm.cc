#include "gemm.h"

#include <nanobind/stl/string.h>

#include <string>
#include <utility>

#include "arguments.h"
#include "stats.h"

namespace xdpy {

GemmContext::GemmContext(nb::object comm, const nb::kwargs& options)
    : Member(std::move(comm), "context") {
  const Given<xd_gemm_config> config(options);
  comm_.call(
      [&](xd_comm* handle) { return xd_gemm_context_create(handle, config.get(), &handle_); });
}

void GemmContext::fail(xd_gemm_operation operation, xd_status status) const {
  Failure failure = comm_.failure();
  failure.operation = operation;
  xd_gemm_status met XD_GEMM_STATUS_INIT;
  if (xd_gemm_last_error(&met) == XD_SUCCESS && met.status == status) failure.peer = met.rank;
  raise(status, failure);
}

nb::dict GemmContext::status() const {
  xd_gemm_status status XD_GEMM_STATUS_INIT;
  check(xd_gemm_context_status(usable(), &status), comm_.failure());
  return fields_of(status);
}

nb::dict GemmContext::stats() const {
  return stats_of(usable(), comm_.info(), comm_.failure(), &xd_gemm_context_stats);
}

void GemmContext::set_name(const std::string& name) const {
  check(xd_gemm_context_set_name(usable(), name.c_str()), comm_.failure());
}

std::uint64_t GemmContext::errors() const {
  const volatile std::uint64_t* word = nullptr;
  check(xd_gemm_context_watch(usable(), &word), comm_.failure());
  return __atomic_load_n(word, __ATOMIC_ACQUIRE);
}

nb::dict GemmContext::gathered() const {
  xd_gemm_view view XD_GEMM_VIEW_INIT;
  check(xd_gemm_gathered(usable(), &view), comm_.failure());
  return fields_of(view);
}

namespace {

void wait(GemmContext& self, std::uintptr_t stream) {
  self.call(XD_GEMM_START_ALL_GATHER,
            [&](xd_gemm_context* context) { return xd_gemm_wait(context, stream_of(stream)); });
}

void join_failed(GemmContext& self, int operation, const std::string& text, std::uintptr_t stream) {
  const auto joined = static_cast<xd_gemm_operation>(operation);
  self.call(joined, [&](xd_gemm_context* context) {
    return xd_gemm_join_failed(context, joined, text.c_str(), stream_of(stream));
  });
}

nb::dict explain(GemmContext& self, int operation, const nb::dict& fields) {
  const Given<xd_gemm_args> args(fields, self.device(), self.num_ranks());
  xd_gemm_plan_info info XD_GEMM_PLAN_INFO_INIT;
  self.call_local([&](xd_gemm_context* context) {
    return xd_gemm_explain(context, static_cast<xd_gemm_operation>(operation), args.get(), &info);
  });
  return fields_of(info);
}

nb::dict gemm_memory(const nb::kwargs& options) {
  const Given<xd_gemm_config> config(options);
  xd_gemm_memory memory XD_GEMM_MEMORY_INIT;
  check(xd_gemm_context_memory(config.get(), &memory));
  return fields_of(memory);
}

std::int64_t gemm_local_size(std::int64_t total, std::int32_t rank, std::int32_t num_ranks) {
  std::int64_t local = 0;
  check(xd_gemm_local_size(total, rank, num_ranks, &local));
  return local;
}

}  // namespace

void bind_gemm(nb::module_& module) {
  using namespace nb::literals;
  nb::class_<GemmContext> context(module, "GemmContext", nb::is_weak_referenceable());
  context.attr("FIRST_OPERATION") = static_cast<int>(XD_GEMM_ALL_GATHER);
  context
      .def("__init__",
           [](GemmContext* self, nb::object comm, const nb::kwargs& options) {
             if (!nb::isinstance<Comm>(comm)) expected("comm", "a Comm", comm);
             new (self) GemmContext(std::move(comm), options);
           })
      .def("close", &GemmContext::close)
      .def_prop_ro("closed", &GemmContext::closed)
      .def_prop_ro("comm", &GemmContext::comm)
      .def("status", &GemmContext::status)
      .def("errors", &GemmContext::errors)
      .def("stats", &GemmContext::stats)
      .def("set_name", &GemmContext::set_name, "name"_a)
      .def("gathered", &GemmContext::gathered)
      .def("all_gather", method<GemmContext>(XD_GEMM_ALL_GATHER, xd_gemm_all_gather), "fields"_a)
      .def("reduce_scatter", method<GemmContext>(XD_GEMM_REDUCE_SCATTER, xd_gemm_reduce_scatter),
           "fields"_a)
      .def("all_reduce", method<GemmContext>(XD_GEMM_ALL_REDUCE, xd_gemm_all_reduce), "fields"_a)
      .def("bulk", method<GemmContext>(XD_GEMM_BULK, xd_gemm_bulk), "fields"_a)
      .def("start_all_gather",
           method<GemmContext>(XD_GEMM_START_ALL_GATHER, xd_gemm_start_all_gather), "fields"_a)
      .def("wait", &wait, "stream"_a = 0)
      .def("join_failed", &join_failed, "operation"_a, "text"_a, "stream"_a = 0)
      .def("explain", &explain, "operation"_a, "fields"_a);
  module.def("gemm_memory", &gemm_memory);
  module.def("gemm_local_size", &gemm_local_size, "total"_a, "rank"_a, "num_ranks"_a);
}

}  // namespace xdpy
