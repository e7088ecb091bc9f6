#include "ep/bulk/local_calls.h"

#include <array>

#include "base/error.h"
#include "base/options.h"

namespace xd::ep {
namespace {

constexpr std::array kIndexTypes = {DType::i32, DType::i64};
constexpr std::array kFlagTypes = {DType::boolean, DType::u8};
constexpr std::int64_t kMostTokens = std::int64_t{1} << 26;

}  // namespace

Tensor read_loads(const DLTensor* loads, std::int32_t clear, const CallContext& context) {
  const Config& config = *context.config;
  XD_REQUIRE(clear == 0 || clear == 1, "clear = ", clear, ", expected 0 or 1");
  constexpr std::array kTypes = {DType::i64};
  const int ndim = loads != nullptr && loads->ndim == 1 ? 1 : 2;
  const Tensor out = read_tensor(
      loads, {.name = "loads", .ndim = ndim, .types = kTypes, .device = context.device});
  if (ndim == 2) require_rows(out, config.ranks, "ranks");
  const std::int64_t experts = ndim == 2 ? out.cols : out.rows;
  XD_REQUIRE(experts == config.logical_experts, "loads: has ", experts,
             " numbers of experts, expected num_logical_experts = ", config.logical_experts);
  return out;
}

RowExpertsCall read_row_experts(const xd_ep_plan_row_experts_args* args,
                                const CallContext& context) {
  const auto a =
      read_struct("args", args, xd_ep_plan_row_experts_args XD_EP_PLAN_ROW_EXPERTS_ARGS_INIT);
  XD_REQUIRE(context.config->layout.has_zones, "row_experts: asked for in a ",
             context.config->layout.name,
             " group, where a row stands for several experts, expected recv_topk_idx of "
             "xd_ep_dispatch");
  XD_REQUIRE(a.plan != nullptr, "plan = NULL");
  return {.plan = {a.plan, a.plan_bytes},
          .row_experts = read_tensor(
              a.row_experts,
              {.name = "row_experts", .ndim = 1, .types = kIndexTypes, .device = context.device})};
}

RoutingLayoutCall read_routing_layout(const xd_ep_routing_layout_args* args, int ranks,
                                      DLDevice device) {
  const auto a =
      read_struct("args", args, xd_ep_routing_layout_args XD_EP_ROUTING_LAYOUT_ARGS_INIT);
  const auto read = [&](const DLTensor* t, const char* name, int ndim, std::span<const DType> types,
                        bool optional) {
    return read_tensor(
        t, {.name = name, .ndim = ndim, .types = types, .device = device, .optional = optional});
  };
  XD_REQUIRE(a.num_experts >= 1 && a.num_experts <= kMaxExperts, "num_experts = ", a.num_experts,
             ", expected 1 to ", kMaxExperts);
  RoutingLayoutCall call{
      .expert_tables = ExpertTables::read(a.expert_ranks, a.num_experts, ranks, ""),
      .topk_idx = read(a.topk_idx, "topk_idx", 2, kIndexTypes, false),
      .rows_per_rank = read(a.rows_per_rank, "rows_per_rank", 1, kIndexTypes, true),
      .rows_per_expert = read(a.rows_per_expert, "rows_per_expert", 1, kIndexTypes, true),
      .token_in_rank = read(a.token_in_rank, "token_in_rank", 2, kFlagTypes, true),
      .bad_ids = read(a.bad_ids, "bad_ids", 1, kIndexTypes, true)};
  XD_REQUIRE(call.topk_idx.rows <= kMostTokens, "topk_idx: has ", call.topk_idx.rows,
             " rows, expected at most ", kMostTokens);
  XD_REQUIRE(call.topk_idx.cols >= 1 && call.topk_idx.cols <= kMaxTopk, "topk_idx: has ",
             call.topk_idx.cols, " columns, expected 1 to ", kMaxTopk);
  if (call.rows_per_rank) require_rows(call.rows_per_rank, ranks, "ranks");
  if (call.rows_per_expert) require_rows(call.rows_per_expert, a.num_experts, "experts");
  if (call.bad_ids) require_rows(call.bad_ids, 1, "one number");
  if (call.token_in_rank) {
    require_rows(call.token_in_rank, call.topk_idx.rows, "rows of topk_idx");
    require_cols(call.token_in_rank, ranks, "ranks");
  }
  return call;
}

}  // namespace xd::ep
