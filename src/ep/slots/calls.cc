#include "ep/slots/calls.h"

#include <array>

#include "base/error.h"
#include "base/options.h"
#include "ep/plan/plan.h"
#include "ep/plan/slot_table.h"
#include "ep/slots/placement.h"

namespace xd::ep {
namespace {

constexpr std::array kIndexTypes = {DType::i32, DType::i64};
constexpr std::array kInt32 = {DType::i32};
constexpr std::array kInt64 = {DType::i64};
constexpr std::array kFloat32 = {DType::f32};
constexpr std::array kRowTypes = {DType::bf16, DType::f16, DType::f32};
constexpr std::array kScaleTypes = {DType::f32, DType::e8m0, DType::u8, DType::e4m3, DType::i32};

template <class Args>
LlArgs<Args> with_halves(const Args& args) {
  const int phase = raw_enum(args.phase);
  XD_REQUIRE(phase >= XD_LL_PHASE_BOTH && phase <= XD_LL_PHASE_RECEIVE, "phase = ", phase,
             ", expected an xd_ll_phase, 0 to ", int{XD_LL_PHASE_RECEIVE});
  return {args, {.send = phase != XD_LL_PHASE_RECEIVE, .receive = phase != XD_LL_PHASE_SEND}};
}

// Reads the tensors of one call.
class Reader {
 public:
  explicit Reader(const LlCallContext& context)
      : config_(*context.config), device_(context.device) {}

  Tensor tensor(const DLTensor* t, const char* name, int ndim, std::span<const DType> types,
                Fit fit = Fit::elements) const {
    return read_tensor(t,
                       {.name = name, .ndim = ndim, .types = types, .device = device_, .fit = fit});
  }
  Tensor optional(const DLTensor* t, const char* name, int ndim, std::span<const DType> types,
                  Fit fit = Fit::elements) const {
    return read_tensor(t, {.name = name,
                           .ndim = ndim,
                           .types = types,
                           .device = device_,
                           .fit = fit,
                           .optional = true});
  }
  // Reads rows of tokens [T,H].
  Tensor rows(const DLTensor* t, const char* name, std::span<const DType> types) const {
    const Tensor read = tensor(t, name, 2, types, Fit::rows);
    XD_REQUIRE(read.rows <= config_.max_tokens, name, ": has ", read.rows,
               " rows, expected at most max_tokens_per_rank = ", config_.max_tokens);
    require_row(name, read.row_bytes());
    return read;
  }
  // Reads a tensor [L,S,columns], or [N,columns] in groups without slots.
  SlotTensor rows_of_experts(const DLTensor* t, const char* name, std::span<const DType> types,
                             SlotFit fit, bool optional = false) const {
    if (config_.has_slots()) return slots(t, name, types, fit, optional);
    const SlotTensor read = read_slot_tensor(
        t, {.name = name, .ndim = 2, .types = types, .device = device_, .optional = optional}, fit);
    if (read && fit != SlotFit::elements) require_row(name, read.row_bytes());
    return read;
  }
  // Reads a tensor [L,S,columns].
  SlotTensor slots(const DLTensor* t, const char* name, std::span<const DType> types, SlotFit fit,
                   bool optional = false) const {
    const SlotTensor read = read_slot_tensor(
        t, {.name = name, .ndim = 3, .types = types, .device = device_, .optional = optional}, fit);
    if (!read) return read;
    XD_REQUIRE(read.experts == config_.local_experts, name, ": has ", read.experts,
               " experts, expected ", config_.local_experts, " (local experts)");
    XD_REQUIRE(read.slots == slots_per_expert(config_), name, ": has ", read.slots,
               " slots, expected ", slots_per_expert(config_),
               " (num_ranks * max_tokens_per_rank)");
    if (fit != SlotFit::elements) require_row(name, read.row_bytes());
    return read;
  }
  // Reads the most tokens of a rank in a call.
  std::int32_t max_tokens(std::int32_t given) const {
    if (config_.has_slots()) {
      XD_REQUIRE(given == 0, "max_tokens = ", given, ", expected 0: ", why_form());
      return 0;
    }
    XD_REQUIRE(given >= 0 && given <= config_.max_tokens, "max_tokens = ", given,
               ", expected 0 to max_tokens_per_rank = ", config_.max_tokens);
    return given != 0 ? given : config_.max_tokens;
  }
  // Refuses a tensor that the group's receive form has no place for.
  void require_none_given(const DLTensor* t, const char* name) const {
    XD_REQUIRE(t == nullptr, name, ": given, expected NULL: ", why_form());
  }
  // Reads scales that the caller gives beside rows.
  Tensor scales(const DLTensor* t, const Tensor& rows) const {
    const Tensor read = optional(t, "scales", 2, kGivenScaleTypes, Fit::input);
    if (!read) return read;
    require_rows(read, rows.rows, "rows of tokens");
    require_fp4_scales(read, rows);
    XD_REQUIRE(read.cols >= 1 && read.cols <= XD_LL_MAX_SCALES, "scales: has ", read.cols,
               " columns, expected 1 to ", XD_LL_MAX_SCALES);
    XD_REQUIRE(rows.row_bytes() + read.row_bytes() <= config_.max_row_bytes, "scales: a row has ",
               read.row_bytes(), " bytes beside ", rows.row_bytes(),
               " of tokens, expected together at most the group's ", config_.max_row_bytes);
    return read;
  }
  Tensor weights(const DLTensor* t) const { return optional(t, "topk_weights", 2, kFloat32); }
  Tensor wait_ns(const DLTensor* t) const {
    const Tensor read = optional(t, "wait_ns", 1, kInt64);
    if (read) require_rows(read, config_.ranks, "ranks");
    return read;
  }

 private:
  void require_row(const char* name, std::uint64_t bytes) const {
    XD_REQUIRE(bytes > 0 && bytes % kRowAlignment == 0, name, ": a row has ", bytes,
               " bytes, expected a positive multiple of ", kRowAlignment);
    XD_REQUIRE(bytes <= config_.max_row_bytes, name, ": a row has ", bytes,
               " bytes, expected at most the group's ", config_.max_row_bytes);
  }

  std::string why_form() const {
    return concat("the group's receive is XD_LL_", receive_name(config_.receive));
  }

  const LlConfig& config_;
  const DLDevice device_;
};

// The outputs that go by slots, or do not.
void read_places(const xd_ll_dispatch_args& args, const Reader& reader, const LlConfig& config,
                 LlDispatchReceive& call) {
  if (config.has_slots()) {
    reader.require_none_given(args.row_offsets, "row_offsets");
    reader.require_none_given(args.recv_weights, "recv_weights");
    reader.require_none_given(args.recv_topk_idx, "recv_topk_idx");
    call.source_ranges = reader.optional(args.source_ranges, "source_ranges", 2, kInt64);
    call.source_tokens = reader.optional(args.source_tokens, "source_tokens", 2, kInt32);
    if (call.source_ranges) {
      require_rows(call.source_ranges, config.local_experts, "local experts");
      require_cols(call.source_ranges, config.ranks, "ranks");
    }
    if (call.source_tokens) {
      require_rows(call.source_tokens, config.local_experts, "local experts");
      require_cols(call.source_tokens, slots_per_expert(config), "slots of an expert");
    }
    return;
  }
  reader.require_none_given(args.source_ranges, "source_ranges");
  reader.require_none_given(args.source_tokens, "source_tokens");
  call.row_offsets = reader.tensor(args.row_offsets, "row_offsets", 1, kInt64);
  require_rows(call.row_offsets, (config.by_rank() ? config.ranks : config.local_experts) + 1,
               config.by_rank() ? "ranks and 1" : "local experts and 1");
  call.recv_weights =
      reader.optional(args.recv_weights, "recv_weights", config.by_rank() ? 2 : 1, kFloat32);
  if (!config.by_rank()) {
    reader.require_none_given(args.recv_topk_idx, "recv_topk_idx");
  } else {
    call.recv_topk_idx = reader.optional(args.recv_topk_idx, "recv_topk_idx", 2, kIndexTypes);
  }
  const std::int64_t rows = call.recv_tokens.slots, bound = recv_bound(config, call.max_tokens);
  XD_REQUIRE(rows >= bound, "recv_tokens: has ", rows, " rows, expected at least xd_ll_recv_bound",
             " = ", bound, " for max_tokens = ", call.max_tokens);
  XD_REQUIRE(!call.recv_scales || call.recv_scales.slots == rows, "recv_scales: has ",
             call.recv_scales.slots, " rows, expected ", rows, " (rows of recv_tokens)");
  for (const Tensor* tensor : {&call.recv_weights, &call.recv_topk_idx}) {
    if (*tensor) require_rows(*tensor, rows, "rows of recv_tokens");
  }
  if (call.recv_weights && call.recv_topk_idx) {
    require_cols(call.recv_weights, call.recv_topk_idx.cols, "columns of recv_topk_idx");
  }
}

// Scales fit the rows beside them, which alone are compared with what another call has sent.
void require_scales(const LlDispatchReceive& call) {
  const SlotTensor& scales = call.recv_scales;
  const QuantiseFormat format = quantise_format(call.quantise);
  if (!format) {  // they are as the send half has them
    XD_REQUIRE(!scales || (scales.cols >= 1 && scales.cols <= XD_LL_MAX_SCALES),
               "recv_scales: has ", scales.cols, " columns, expected 1 to ", XD_LL_MAX_SCALES);
    return;
  }
  XD_REQUIRE(scales, "recv_scales = NULL, expected a tensor: quantise = XD_EP_QUANTISE_",
             quantise_name(call.quantise));
  const auto columns = static_cast<std::uint64_t>(call.recv_tokens.cols);
  if (format.scale_bytes == 4) {
    require_type(scales, DType::f32);
    return require_columns(scales, columns / format.block, "hidden / 128");
  }
  XD_REQUIRE(scales.type != DType::f32 && scales.type != DType::e4m3, scales.name, ": is ",
             dtype_name(scales.type), ", expected float8_e8m0fnu, uint8 or int32");
  if (scales.type != DType::i32) {
    return require_columns(scales, columns / format.block, "hidden / 128");
  }
  XD_REQUIRE(columns % 512 == 0, scales.name, ": is int32, expected hidden = ", columns,
             " to be a multiple of 512");
  require_columns(scales, columns / 512, "hidden / 512");
}

xd_ep_quantise read_way(const xd_ll_dispatch_args& args) {
  const int way = raw_enum(args.quantise);
  XD_REQUIRE(way >= XD_EP_QUANTISE_NONE && way <= XD_EP_QUANTISE_FP8_BLOCK128_E8M0,
             "quantise = ", way, ", expected 0 to ", int{XD_EP_QUANTISE_FP8_BLOCK128_E8M0},
             ", as low latency has blocks of 128 columns");
  return args.quantise;
}

PlanBytes read_plan(const void* plan, std::size_t bytes) {
  XD_REQUIRE(plan != nullptr, "plan = NULL, expected the bytes of a plan");
  return {plan, bytes};
}

}  // namespace

LlArgs<xd_ll_dispatch_args> read_ll_args(const xd_ll_dispatch_args* args) {
  return with_halves(read_struct("args", args, xd_ll_dispatch_args XD_LL_DISPATCH_ARGS_INIT));
}

LlArgs<xd_ll_combine_args> read_ll_args(const xd_ll_combine_args* args) {
  return with_halves(read_struct("args", args, xd_ll_combine_args XD_LL_COMBINE_ARGS_INIT));
}

LlDispatchSend read_ll_send(const xd_ll_dispatch_args& args, const LlCallContext& context) {
  const Reader reader(context);
  LlDispatchSend call{.tokens = reader.rows(args.tokens, "tokens", kMovedTypes),
                      .topk_idx = reader.tensor(args.topk_idx, "topk_idx", 2, kIndexTypes),
                      .topk_weights = reader.weights(args.topk_weights),
                      .scales = {},
                      .quantise = read_way(args),
                      .max_tokens = reader.max_tokens(args.max_tokens)};
  const LlConfig& config = *context.config;
  XD_REQUIRE(config.has_slots() || call.tokens.rows <= call.max_tokens, "tokens: has ",
             call.tokens.rows, " rows, expected at most max_tokens = ", call.max_tokens);
  require_rows(call.topk_idx, call.tokens.rows, "rows of tokens");
  call.replica_hint =
      read_replica_hint(args.replica_hint, call.tokens.rows, config, context.device);
  XD_REQUIRE(call.topk_idx.cols >= 1 && call.topk_idx.cols <= config.max_topk, "topk_idx: has ",
             call.topk_idx.cols, " columns, expected 1 to max_topk = ", config.max_topk);
  if (call.topk_weights) {
    require_rows(call.topk_weights, call.tokens.rows, "rows of tokens");
    require_cols(call.topk_weights, call.topk_idx.cols, "columns of topk_idx");
  }
  if (const QuantiseFormat format = quantise_format(call.quantise)) {
    XD_REQUIRE(args.scales == nullptr, "scales: given, expected NULL: quantise = XD_EP_QUANTISE_",
               quantise_name(call.quantise));
    XD_REQUIRE(call.tokens.type == DType::bf16, "tokens: is ", dtype_name(call.tokens.type),
               ", expected bfloat16: quantise = XD_EP_QUANTISE_", quantise_name(call.quantise));
    XD_REQUIRE(call.tokens.cols % format.block == 0, "tokens: has ", call.tokens.cols,
               " columns, expected a multiple of ", format.block, ": quantise = XD_EP_QUANTISE_",
               quantise_name(call.quantise));
  }
  call.scales = reader.scales(args.scales, call.tokens);
  return call;
}

LlDispatchReceive read_ll_receive(const xd_ll_dispatch_args& args, const LlCallContext& context) {
  const Reader reader(context);
  const LlConfig& config = *context.config;
  const std::size_t plan_bytes = plan_size(config);
  XD_REQUIRE(args.plan != nullptr, "plan = NULL, expected ", plan_bytes, " bytes");
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(args.plan) % 16 == 0, "plan is at ", args.plan,
             ", expected a 16-byte aligned address");
  XD_REQUIRE(args.plan_bytes >= plan_bytes, "plan_bytes = ", args.plan_bytes,
             ", expected at least xd_ll_plan_size = ", plan_bytes);
  LlDispatchReceive call{
      .plan = static_cast<std::byte*>(args.plan),
      .quantise = read_way(args),
      .recv_tokens =
          reader.rows_of_experts(args.recv_tokens, "recv_tokens", kMovedTypes, SlotFit::rows_out),
      .recv_scales = reader.rows_of_experts(args.recv_scales, "recv_scales", kScaleTypes,
                                            SlotFit::elements, true),
      .counts = reader.tensor(args.counts, "counts", 1, kInt32),
      .expert_load = reader.optional(args.expert_load, "expert_load", 1, kIndexTypes),
      .wait_ns = reader.wait_ns(args.wait_ns),
      .max_tokens = reader.max_tokens(args.max_tokens),
      .by_rank = config.by_rank()};
  require_rows(call.counts, config.local_experts, "local experts");
  if (call.expert_load) require_rows(call.expert_load, config.local_experts, "local experts");
  read_places(args, reader, config, call);
  require_scales(call);
  return call;
}

LlCombineSend read_ll_send(const xd_ll_combine_args& args, const LlCallContext& context) {
  const Reader reader(context);
  LlCombineSend call{.plan = read_plan(args.plan, args.plan_bytes),
                     .expert_out = reader.rows_of_experts(args.expert_out, "expert_out", kRowTypes,
                                                          SlotFit::rows_in)};
  call.wire = read_wire(args.wire, *context.config);
  require_wire_fits(call.wire, call.expert_out.name, call.expert_out.cols);
  if (context.config->by_rank()) {
    reader.require_none_given(args.topk_weights, "topk_weights");
  } else {
    call.topk_weights = reader.weights(args.topk_weights);
  }
  return call;
}

LlCombineReceive read_ll_receive(const xd_ll_combine_args& args, const LlCallContext& context) {
  const Reader reader(context);
  LlCombineReceive call{.plan = read_plan(args.plan, args.plan_bytes),
                        .out = reader.rows(args.out, "out", kRowTypes),
                        .wait_ns = reader.wait_ns(args.wait_ns),
                        .wire = read_wire(args.wire, *context.config)};
  require_wire_fits(call.wire, call.out.name, call.out.cols);
  return call;
}

Tensor read_ll_mask(const DLTensor* mask, const LlCallContext& context) {
  const Tensor read = Reader(context).tensor(mask, "mask", 1, kInt32);
  require_rows(read, context.config->ranks, "ranks");
  return read;
}

void require_maskable(std::int32_t rank, std::int32_t masked, int own_rank,
                      const LlConfig& config) {
  XD_REQUIRE(rank >= 0 && rank < config.ranks, "rank = ", rank, ", expected 0 to ",
             config.ranks - 1);
  XD_REQUIRE(rank != own_rank, "rank = ", rank, ", expected another rank than this one");
  XD_REQUIRE(masked == 0 || masked == 1, "masked = ", masked, ", expected 0 or 1");
}

}  // namespace xd::ep
