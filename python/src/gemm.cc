#include "gemm.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/string.h>

#include <optional>
#include <string>
#include <utility>

#include "arguments.h"
#include "gemm_args.h"
#include "stats.h"

namespace xdpy {

GemmContext::GemmContext(nb::object comm, const nb::kwargs& options)
    : Member(std::move(comm), "context") {
  const xd_gemm_config config = gemm_config(options);
  comm_.call([&](xd_comm* handle) { return xd_gemm_context_create(handle, &config, &handle_); });
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
  nb::dict rows;
  rows["ptr"] = address(view.data);
  rows["rows"] = view.rows;
  rows["columns"] = view.columns;
  rows["pitch_bytes"] = view.pitch_bytes;
  rows["dtype"] = view.dtype.code << 8 | view.dtype.bits;
  return rows;
}

namespace {

xd_stream stream_in(const nb::kwargs& given) {
  if (!given.contains("stream")) return nullptr;
  return stream_of(integer<std::uint64_t>(given["stream"], "stream"));
}

using Operation = xd_status (*)(xd_gemm_context*, const xd_gemm_args*, xd_stream);

template <xd_gemm_operation operation, Operation function>
void product(GemmContext& self, const nb::kwargs& given) {
  const GemmArgs args(given, self.device(), self.num_ranks());
  const xd_stream stream = stream_in(given);
  self.call(operation,
            [&](xd_gemm_context* context) { return function(context, args.get(), stream); });
}

void bulk(GemmContext& self, int collective, nb::handle input, nb::handle out,
          nb::handle tokens_per_rank, const std::optional<nb::dict>& of_product,
          std::uintptr_t stream, nb::handle tag) {
  const DLDevice device = self.device();
  const Tensor input_tensor(input, "in", device);
  const Tensor out_tensor(out, "out", device);
  TokensPerRank tokens;
  tokens.read(tokens_per_rank, self.num_ranks());
  std::optional<GemmArgs> product_args;
  if (of_product) product_args.emplace(*of_product, device, self.num_ranks());
  xd_gemm_bulk_args args XD_GEMM_BULK_ARGS_INIT;
  args.product = product_args ? product_args->get() : nullptr;
  args.collective = static_cast<xd_gemm_operation>(collective);
  args.in = input_tensor.get();
  args.out = out_tensor.get();
  args.tokens_per_rank = tokens.get();
  args.tag = integer<std::uint32_t>(tag, "tag");
  self.call(XD_GEMM_BULK, [&](xd_gemm_context* context) {
    return xd_gemm_bulk(context, &args, stream_of(stream));
  });
}

void start_all_gather(GemmContext& self, nb::handle input, nb::handle out,
                      nb::handle tokens_per_rank, std::uintptr_t stream, nb::handle tag) {
  const DLDevice device = self.device();
  const Tensor input_tensor(input, "in", device);
  const Tensor out_tensor(out, "out", device);
  TokensPerRank tokens;
  tokens.read(tokens_per_rank, self.num_ranks());
  xd_gemm_gather_args args XD_GEMM_GATHER_ARGS_INIT;
  args.in = input_tensor.get();
  args.out = out_tensor.get();
  args.tokens_per_rank = tokens.get();
  args.tag = integer<std::uint32_t>(tag, "tag");
  self.call(XD_GEMM_START_ALL_GATHER, [&](xd_gemm_context* context) {
    return xd_gemm_start_all_gather(context, &args, stream_of(stream));
  });
}

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

nb::dict explain(GemmContext& self, int operation, const nb::kwargs& given) {
  const GemmArgs args(given, self.device(), self.num_ranks());
  xd_gemm_plan_info info XD_GEMM_PLAN_INFO_INIT;
  self.call_local([&](xd_gemm_context* context) {
    return xd_gemm_explain(context, static_cast<xd_gemm_operation>(operation), args.get(), &info);
  });
  return fields_of(info);
}

nb::dict gemm_memory(const nb::kwargs& options) {
  const xd_gemm_config config = gemm_config(options);
  xd_gemm_memory memory XD_GEMM_MEMORY_INIT;
  check(xd_gemm_context_memory(&config, &memory));
  nb::dict sizes;
  sizes["symmetric_bytes"] = memory.symmetric_bytes;
  sizes["private_bytes"] = memory.private_bytes;
  return sizes;
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
      .def("all_gather", &product<XD_GEMM_ALL_GATHER, xd_gemm_all_gather>)
      .def("reduce_scatter", &product<XD_GEMM_REDUCE_SCATTER, xd_gemm_reduce_scatter>)
      .def("all_reduce", &product<XD_GEMM_ALL_REDUCE, xd_gemm_all_reduce>)
      .def("bulk", &bulk, "collective"_a, "input"_a, "out"_a, "tokens_per_rank"_a = nb::none(),
           "product"_a = nb::none(), "stream"_a = 0, "tag"_a = 0)
      .def("start_all_gather", &start_all_gather, "input"_a, "out"_a,
           "tokens_per_rank"_a = nb::none(), "stream"_a = 0, "tag"_a = 0)
      .def("wait", &wait, "stream"_a = 0)
      .def("join_failed", &join_failed, "operation"_a, "text"_a, "stream"_a = 0)
      .def("explain", &explain, "operation"_a, "options"_a);
  module.def("gemm_memory", &gemm_memory);
  module.def("gemm_local_size", &gemm_local_size, "total"_a, "rank"_a, "num_ranks"_a);
}

}  // namespace xdpy
