#include <crossdock/gemm.h>
#include <crossdock/stats.h>

#include "base/options.h"
#include "capi/boundary.h"
#include "gemm/executors.h"

using xd::guarded;
using xd::guarded_on;
using xd::gemm::Context;

struct xd_gemm_context {
  std::unique_ptr<Context> context;
};

namespace {

template <class Call>
xd_status operate(const char* function, xd_gemm_context* context, std::int32_t operation,
                  Call&& call) {
  XD_REQUIRE_GIVEN(function, context);
  return xd::operate_on(function, *context->context, operation, std::forward<Call>(call));
}

// A call that only asks.
template <class Call>
xd_status ask(const char* function, xd_gemm_context* context, Call&& call) {
  XD_REQUIRE_GIVEN(function, context);
  Context& c = *context->context;
  return guarded_on(function, c.comm(), [&] {
    c.comm().errors().check_process();
    std::forward<Call>(call)(c);
  });
}

}  // namespace

xd_status xd_gemm_context_memory(const xd_gemm_config* config, xd_gemm_memory* memory) {
  return guarded("xd_gemm_context_memory", [&] {
    const xd::gemm::Config read = xd::gemm::read_config(config, 0);
    const int device_type = read.device_type != 0 ? read.device_type : kDLCPU;
    xd::write_struct("memory", memory, xd::gemm::executor_for(device_type).context_memory(read));
  });
}

xd_status xd_gemm_local_size(int64_t global, int32_t rank, int32_t num_ranks, int64_t* local) {
  XD_REQUIRE_GIVEN("xd_gemm_local_size", local);
  return guarded("xd_gemm_local_size",
                 [&] { *local = xd::gemm::local_size(global, rank, num_ranks); });
}

xd_status xd_gemm_context_create(xd_comm* comm, const xd_gemm_config* config,
                                 xd_gemm_context** context) {
  XD_REQUIRE_GIVEN("xd_gemm_context_create", comm);
  if (context != nullptr) *context = nullptr;
  return guarded_on("xd_gemm_context_create", *comm->comm, [&] {
    comm->comm->errors().check_usable();
    comm->comm->make_group(xd::gemm::kCreateContext, [&] {
      XD_REQUIRE(context != nullptr, "context = NULL, expected a pointer");
      auto handle = std::make_unique<xd_gemm_context>();
      const auto& executor = xd::gemm::executor_for(comm->comm->device().device_type);
      handle->context = executor.make_context(comm->comm, config);
      *context = handle.release();
    });
  });
}

xd_status xd_gemm_context_destroy(xd_gemm_context* context) {
  return guarded("xd_gemm_context_destroy", [&] { delete context; });
}

xd_status xd_gemm_context_status(xd_gemm_context* context, xd_gemm_status* status) {
  XD_REQUIRE_GIVEN("xd_gemm_context_status", status);
  return ask("xd_gemm_context_status", context, [&](Context& c) {
    // The status is taken, and cleared, only once the struct that receives it is known to be good.
    xd::write_struct("status", status, xd_gemm_status XD_GEMM_STATUS_INIT);
    xd::write_struct("status", status, c.take_status());
  });
}

xd_status xd_gemm_last_error(xd_gemm_status* status) {
  XD_REQUIRE_GIVEN("xd_gemm_last_error", status);
  return guarded("xd_gemm_last_error",
                 [&] { xd::write_struct("status", status, Context::last_error()); });
}

xd_status xd_gemm_context_watch(xd_gemm_context* context, const volatile uint64_t** word) {
  XD_REQUIRE_GIVEN("xd_gemm_context_watch", word);
  return ask("xd_gemm_context_watch", context, [&](Context& c) { *word = c.watch(); });
}

xd_status xd_gemm_all_gather(xd_gemm_context* context, const xd_gemm_args* args, xd_stream stream) {
  return operate("xd_gemm_all_gather", context, XD_GEMM_ALL_GATHER,
                 [&](Context& c) { c.product(XD_GEMM_ALL_GATHER, args, stream); });
}

xd_status xd_gemm_reduce_scatter(xd_gemm_context* context, const xd_gemm_args* args,
                                 xd_stream stream) {
  return operate("xd_gemm_reduce_scatter", context, XD_GEMM_REDUCE_SCATTER,
                 [&](Context& c) { c.product(XD_GEMM_REDUCE_SCATTER, args, stream); });
}

xd_status xd_gemm_all_reduce(xd_gemm_context* context, const xd_gemm_args* args, xd_stream stream) {
  return operate("xd_gemm_all_reduce", context, XD_GEMM_ALL_REDUCE,
                 [&](Context& c) { c.product(XD_GEMM_ALL_REDUCE, args, stream); });
}

xd_status xd_gemm_bulk(xd_gemm_context* context, const xd_gemm_bulk_args* args, xd_stream stream) {
  return operate("xd_gemm_bulk", context, XD_GEMM_BULK, [&](Context& c) { c.bulk(args, stream); });
}

xd_status xd_gemm_start_all_gather(xd_gemm_context* context, const xd_gemm_gather_args* args,
                                   xd_stream stream) {
  return operate("xd_gemm_start_all_gather", context, XD_GEMM_START_ALL_GATHER,
                 [&](Context& c) { c.start_all_gather(args, stream); });
}

xd_status xd_gemm_wait(xd_gemm_context* context, xd_stream stream) {
  return operate("xd_gemm_wait", context, xd::kNoOperation, [&](Context& c) { c.wait(stream); });
}

xd_status xd_gemm_gathered(xd_gemm_context* context, xd_gemm_view* rows) {
  XD_REQUIRE_GIVEN("xd_gemm_gathered", rows);
  return ask("xd_gemm_gathered", context,
             [&](Context& c) { xd::write_struct("rows", rows, c.gathered()); });
}

xd_status xd_gemm_join_failed(xd_gemm_context* context, xd_gemm_operation operation,
                              const char* text, xd_stream stream) {
  return operate("xd_gemm_join_failed", context, xd::raw_enum(operation),
                 [&](Context& c) { c.join_failed(xd::raw_enum(operation), text, stream); });
}

xd_status xd_gemm_explain(xd_gemm_context* context, xd_gemm_operation operation,
                          const xd_gemm_args* args, xd_gemm_plan_info* info) {
  XD_REQUIRE_GIVEN("xd_gemm_explain", info);
  return ask("xd_gemm_explain", context, [&](Context& c) {
    xd::write_struct("info", info, c.explain(xd::raw_enum(operation), args));
  });
}

xd_status xd_gemm_context_stats(xd_gemm_context* context, xd_stats* stats, int64_t* wait_ns) {
  return ask("xd_gemm_context_stats", context,
             [&](Context& c) { xd::tell_stats(c.subject(), stats, wait_ns); });
}

xd_status xd_gemm_context_set_name(xd_gemm_context* context, const char* name) {
  XD_REQUIRE_GIVEN("xd_gemm_context_set_name", name);
  return ask("xd_gemm_context_set_name", context, [&](Context& c) { c.subject().set_name(name); });
}
