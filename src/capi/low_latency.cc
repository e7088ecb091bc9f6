#include <crossdock/low_latency.h>

#include "capi/boundary.h"
#include "ep/executors.h"

using xd::count_tokens;
using xd::guarded;
using xd::operate;
using xd::ep::LlGroup;

namespace {

template <class Args>
bool sends(const Args& args) {
  return args.phase != XD_LL_PHASE_RECEIVE;
}
template <class Args>
bool receives(const Args& args) {
  return args.phase != XD_LL_PHASE_SEND;
}

}  // namespace

xd_status xd_ll_local_experts(const xd_ll_config* config, int32_t rank,
                              int32_t* num_local_experts) {
  XD_REQUIRE_GIVEN("xd_ll_local_experts", num_local_experts);
  return guarded("xd_ll_local_experts", [&] {
    *num_local_experts = xd::local_experts_of(xd::ep::read_ll_config(config, 0), rank);
  });
}

xd_status xd_ll_plan_size(const xd_ll_config* config, size_t* bytes) {
  XD_REQUIRE_GIVEN("xd_ll_plan_size", bytes);
  return guarded("xd_ll_plan_size",
                 [&] { *bytes = xd::ep::plan_size(xd::ep::read_ll_config(config, 0)); });
}

xd_status xd_ll_recv_bound(const xd_ll_config* config, int32_t max_tokens, int64_t* rows) {
  XD_REQUIRE_GIVEN("xd_ll_recv_bound", rows);
  return guarded("xd_ll_recv_bound", [&] {
    const xd::ep::LlConfig read = xd::ep::read_ll_config(config, 0);
    XD_REQUIRE(!read.has_slots(),
               "config.receive = XD_LL_SLOTS, expected XD_LL_BY_EXPERT or XD_LL_BY_RANK");
    *rows = xd::ep::recv_bound(read, max_tokens);
  });
}

xd_status xd_ll_group_memory(const xd_ll_config* config, xd_ll_memory* memory) {
  return guarded("xd_ll_group_memory", [&] {
    const xd::ep::LlConfig read = xd::ep::read_ll_config(config, 0);
    const auto& executor = xd::ep::slots_executor_for(xd::device_type_of(read));
    xd::write_struct("memory", memory, executor.group_memory(read));
  });
}

xd_status xd_ll_group_create(xd_comm* comm, const xd_ll_config* config, xd_ll_group** group) {
  return xd::create_group(comm, group, [&] {
    const auto& executor = xd::ep::slots_executor_for(comm->comm->device().device_type);
    return executor.make_group(comm->comm, config);
  });
}

xd_status xd_ll_group_destroy(xd_ll_group* group) {
  return guarded("xd_ll_group_destroy", [&] { delete group; });
}

xd_status xd_ll_group_status(xd_ll_group* group, xd_ll_status* status) {
  return xd::take_group_status("xd_ll_group_status", group, status);
}

xd_status xd_ll_last_error(xd_ll_status* status) {
  XD_REQUIRE_GIVEN("xd_ll_last_error", status);
  return guarded("xd_ll_last_error",
                 [&] { xd::write_struct("status", status, LlGroup::last_error()); });
}

xd_status xd_ll_group_watch(xd_ll_group* group, const volatile uint64_t** word) {
  return xd::watch_group("xd_ll_group_watch", group, word);
}

xd_status xd_ll_dispatch(xd_ll_group* group, const xd_ll_dispatch_args* args, xd_stream stream) {
  const xd_status status = operate("xd_ll_dispatch", group, XD_LL_DISPATCH,
                                   [&](LlGroup& g) { g.dispatch(args, stream); });
  return count_tokens(status, group, status == XD_SUCCESS && sends(*args) ? args->tokens : nullptr);
}

xd_status xd_ll_combine(xd_ll_group* group, const xd_ll_combine_args* args, xd_stream stream) {
  const xd_status status =
      operate("xd_ll_combine", group, XD_LL_COMBINE, [&](LlGroup& g) { g.combine(args, stream); });
  return count_tokens(status, group, status == XD_SUCCESS && receives(*args) ? args->out : nullptr);
}

xd_status xd_ll_mask_set(xd_ll_group* group, int32_t rank, int32_t masked, xd_stream stream) {
  return operate("xd_ll_mask_set", group, xd::kNoOperation,
                 [&](LlGroup& g) { g.mask_set(rank, masked, stream); });
}

xd_status xd_ll_mask_get(xd_ll_group* group, const DLTensor* mask, xd_stream stream) {
  return operate("xd_ll_mask_get", group, xd::kNoOperation,
                 [&](LlGroup& g) { g.mask_get(mask, stream); });
}

xd_status xd_ll_reset(xd_ll_group* group, xd_stream stream) {
  return operate("xd_ll_reset", group, XD_LL_RESET, [&](LlGroup& g) { g.reset(stream); });
}

xd_status xd_ll_join_failed(xd_ll_group* group, xd_ll_operation operation, const char* text,
                            xd_stream stream) {
  return operate("xd_ll_join_failed", group, xd::raw_enum(operation), [&](LlGroup& g) {
    g.join_failed_operation(xd::raw_enum(operation), text, stream);
  });
}

xd_status xd_ll_plan_get_info(const void* plan, size_t plan_bytes, xd_ll_plan_info* info) {
  return guarded("xd_ll_plan_get_info", [&] {
    const xd::ep::PlanHeader h = xd::ep::LlPlanView::open(plan, plan_bytes).header();
    xd_ll_plan_info value XD_LL_PLAN_INFO_INIT;
    value.rank = h.rank;
    value.num_ranks = h.ranks;
    value.num_experts = h.experts;
    value.num_tokens = h.tokens;
    value.topk = h.topk;
    value.recv_rows = h.recv_rows;
    value.bad_ids = h.bad_ids;
    value.bad_id_rank = h.bad_id_rank;
    value.fingerprint = h.fingerprint;
    value.epoch = h.epoch;
    xd::write_struct("info", info, value);
  });
}
