#include <crossdock/ep.h>

#include "capi/boundary.h"
#include "ep/bulk/calls.h"
#include "ep/bulk/local_calls.h"
#include "ep/executors.h"

using xd::count_tokens;
using xd::guarded;
using xd::guarded_on;
using xd::operate;

xd_status xd_ep_recv_bound(const xd_ep_config* config, int64_t* rows) {
  XD_REQUIRE_GIVEN("xd_ep_recv_bound", rows);
  return guarded("xd_ep_recv_bound",
                 [&] { *rows = xd::ep::recv_bound(xd::ep::read_config(config, 0)); });
}

xd_status xd_ep_local_experts(const xd_ep_config* config, int32_t rank,
                              int32_t* num_local_experts) {
  XD_REQUIRE_GIVEN("xd_ep_local_experts", num_local_experts);
  return guarded("xd_ep_local_experts", [&] {
    *num_local_experts = xd::local_experts_of(xd::ep::read_config(config, 0), rank);
  });
}

xd_status xd_ep_plan_size(const xd_ep_config* config, size_t* bytes) {
  XD_REQUIRE_GIVEN("xd_ep_plan_size", bytes);
  return guarded("xd_ep_plan_size",
                 [&] { *bytes = xd::ep::plan_size(xd::ep::read_config(config, 0)); });
}

xd_status xd_ep_group_memory(const xd_ep_config* config, xd_ep_memory* memory) {
  return guarded("xd_ep_group_memory", [&] {
    const xd::ep::Config read = xd::ep::read_config(config, 0);
    const auto& executor = xd::ep::bulk_executor_for(xd::device_type_of(read));
    xd::write_struct("memory", memory, executor.group_memory(read));
  });
}

xd_status xd_ep_group_create(xd_comm* comm, const xd_ep_config* config, xd_ep_group** group) {
  return xd::create_group(comm, group, [&] {
    const auto& executor = xd::ep::bulk_executor_for(comm->comm->device().device_type);
    return executor.make_group(comm->comm, config);
  });
}

xd_status xd_ep_group_destroy(xd_ep_group* group) {
  return guarded("xd_ep_group_destroy", [&] { delete group; });
}

xd_status xd_ep_group_status(xd_ep_group* group, xd_ep_status* status) {
  return xd::take_group_status("xd_ep_group_status", group, status);
}

xd_status xd_ep_last_error(xd_ep_status* status) {
  XD_REQUIRE_GIVEN("xd_ep_last_error", status);
  return guarded("xd_ep_last_error",
                 [&] { xd::write_struct("status", status, xd::ep::Group::last_error()); });
}

xd_status xd_ep_group_watch(xd_ep_group* group, const volatile uint64_t** word) {
  return xd::watch_group("xd_ep_group_watch", group, word);
}

xd_status xd_ep_prepare(xd_ep_group* group, const xd_ep_prepare_args* args, xd_stream stream) {
  return operate("xd_ep_prepare", group, XD_EP_PREPARE,
                 [&](xd::ep::Group& g) { g.prepare(args, stream); });
}

// Tokens of an operation in parts count once, with the first.
template <class Args>
static bool counts(xd_status status, const Args* args) {
  return status == XD_SUCCESS && (!xd::ep::has_part(*args) || args->part <= 1);
}

xd_status xd_ep_dispatch(xd_ep_group* group, const xd_ep_dispatch_args* args, xd_stream stream) {
  const xd_status status = operate("xd_ep_dispatch", group, XD_EP_DISPATCH,
                                   [&](xd::ep::Group& g) { g.dispatch(args, stream); });
  return count_tokens(status, group, counts(status, args) ? args->tokens : nullptr);
}

xd_status xd_ep_combine(xd_ep_group* group, const xd_ep_combine_args* args, xd_stream stream) {
  const xd_status status = operate("xd_ep_combine", group, XD_EP_COMBINE,
                                   [&](xd::ep::Group& g) { g.combine(args, stream); });
  return count_tokens(status, group, counts(status, args) ? args->out : nullptr);
}

xd_status xd_ep_dispatch_bwd(xd_ep_group* group, const xd_ep_dispatch_bwd_args* args,
                             xd_stream stream) {
  const xd_status status = operate("xd_ep_dispatch_bwd", group, XD_EP_DISPATCH_BWD,
                                   [&](xd::ep::Group& g) { g.dispatch_bwd(args, stream); });
  return count_tokens(status, group, counts(status, args) ? args->grad_tokens : nullptr);
}

xd_status xd_ep_combine_bwd(xd_ep_group* group, const xd_ep_combine_bwd_args* args,
                            xd_stream stream) {
  const xd_status status = operate("xd_ep_combine_bwd", group, XD_EP_COMBINE_BWD,
                                   [&](xd::ep::Group& g) { g.combine_bwd(args, stream); });
  return count_tokens(status, group, counts(status, args) ? args->grad_out : nullptr);
}

xd_status xd_ep_join_failed(xd_ep_group* group, xd_ep_operation operation, const char* text,
                            xd_stream stream) {
  return operate("xd_ep_join_failed", group, xd::raw_enum(operation),
                 [&](xd::ep::Group& g) { g.join_failed(xd::raw_enum(operation), text, stream); });
}

xd_status xd_ep_plan_row_experts(xd_ep_group* group, const xd_ep_plan_row_experts_args* args,
                                 xd_stream stream) {
  return operate("xd_ep_plan_row_experts", group, xd::kNoOperation,
                 [&](xd::ep::Group& g) { g.row_experts(args, stream); });
}

xd_status xd_ep_routing_layout(xd_comm* comm, const xd_ep_routing_layout_args* args,
                               xd_stream stream) {
  XD_REQUIRE_GIVEN("xd_ep_routing_layout", comm);
  const xd::Comm& c = *comm->comm;
  return guarded_on("xd_ep_routing_layout", c, [&] {
    c.errors().check_open();
    const auto call = xd::ep::read_routing_layout(args, c.num_ranks(), c.device());
    xd::ep::bulk_executor_for(c.device().device_type).routing_layout(call, c.device(), stream);
  });
}

xd_status xd_ep_plan_get_info(const void* plan, size_t plan_bytes, xd_ep_plan_info* info) {
  return guarded("xd_ep_plan_get_info", [&] {
    // Zones, where the layout has some, are looked at as well.
    const auto view = xd::ep::PlanView::open(plan, plan_bytes);
    const xd::ep::PlanHeader& h = view.header();
    xd_ep_plan_info value XD_EP_PLAN_INFO_INIT;
    value.rank = h.rank;
    value.num_ranks = h.ranks;
    value.num_experts = h.experts;
    value.num_tokens = h.tokens;
    value.topk = h.topk;
    value.layout = static_cast<xd_ep_layout>(h.layout);
    value.alignment = h.alignment;
    value.recv_rows = h.recv_rows;
    value.total_rows = h.total_rows;
    value.capacity_rows = xd::ep::capacity_of(h);
    value.bad_ids = h.bad_ids;
    value.bad_id_rank = h.bad_id_rank;
    value.overflow_rank = h.overflow_rank;
    value.fingerprint = h.fingerprint;
    value.epoch = h.epoch;
    value.parts = view.parts();
    xd::write_struct("info", info, value);
  });
}
