#include "ep/bulk/calls.h"

#include <array>
#include <bit>

#include "base/error.h"
#include "base/options.h"
#include "ep/plan/plan.h"
#include "ep/plan/slot_table.h"

namespace xd::ep {
namespace {

constexpr std::array kIndexTypes = {DType::i32, DType::i64};
constexpr std::array kWeightTypes = {DType::f32};
constexpr std::array kReducibleTypes = {DType::bf16, DType::f16, DType::f32};

// Reads the tensors of one call, which differ in name, dimensions and types only.
class Reader {
 public:
  explicit Reader(const CallContext& context) : context_(context) {}

  Tensor required(const DLTensor* t, const char* name, int ndim,
                  std::span<const DType> types) const {
    return read_tensor(t, {.name = name, .ndim = ndim, .types = types, .device = context_.device});
  }
  Tensor optional(const DLTensor* t, const char* name, int ndim, std::span<const DType> types,
                  Fit fit = Fit::elements) const {
    return read_tensor(t, {.name = name,
                           .ndim = ndim,
                           .types = types,
                           .device = context_.device,
                           .fit = fit,
                           .optional = true});
  }
  // Reads rows of tokens.
  Tensor rows(const DLTensor* t, const char* name, std::span<const DType> types,
              bool optional = false) const {
    return read_tensor(t, {.name = name,
                           .ndim = 2,
                           .types = types,
                           .device = context_.device,
                           .fit = Fit::rows,
                           .optional = optional});
  }
  // Reads an output of prepare, which may be host memory.
  Tensor numbers(const DLTensor* t, const char* name, int ndim) const {
    return read_tensor(t, {.name = name,
                           .ndim = ndim,
                           .types = kIndexTypes,
                           .device = context_.device,
                           .optional = true,
                           .pinned_host = true});
  }
  Tensor reducible(const DLTensor* t, const char* name) const {
    return rows(t, name, kReducibleTypes);
  }
  // Reads weights of receive rows: [R] in EXPERT_MAJOR, [R,K] in RANK_MAJOR.
  Tensor recv_weights(const DLTensor* t, const char* name) const {
    return optional(t, name, context_.config->layout.weights_ndim(), kWeightTypes);
  }
  // Weights that are given only where each receive row is one expert's.
  Tensor row_weights(const DLTensor* t, const char* name) const {
    const Layout& layout = context_.config->layout;
    XD_REQUIRE(t == nullptr || layout.row_per_expert, name, ": given in ", layout.name,
               ", expected NULL: a row there stands for several experts, "
               "whose results the caller has already weighted and summed");
    return optional(t, name, 1, kWeightTypes);
  }

 private:
  const CallContext& context_;
};

PlanBytes read_plan(const void* plan, std::size_t bytes) {
  XD_REQUIRE(plan != nullptr, "plan = NULL, expected the bytes of a plan");
  return {plan, bytes};
}

void require_tokens_fit(const Tensor& tensor, const Config& config) {
  XD_REQUIRE(tensor.rows <= config.max_tokens, tensor.name, ": has ", tensor.rows,
             " rows, expected at most max_tokens_per_rank = ", config.max_tokens);
}

void require_topk_fits(const Tensor& tensor, const Config& config) {
  XD_REQUIRE(tensor.cols >= 1 && tensor.cols <= config.max_topk, tensor.name, ": has ", tensor.cols,
             " columns, expected 1 to max_topk = ", config.max_topk);
}

void require_row_fits(const Tensor& tensor, const Config& config) {
  XD_REQUIRE(tensor.row_bytes() > 0 && tensor.row_bytes() % kRowAlignment == 0, tensor.name,
             ": a row has ", tensor.row_bytes(), " bytes, expected a positive multiple of ",
             kRowAlignment);
  XD_REQUIRE(tensor.row_bytes() <= config.max_row_bytes, tensor.name, ": a row has ",
             tensor.row_bytes(), " bytes, expected at most the group's ", config.max_row_bytes);
}

// Checks rows that are summed, and the tensor of the sums.
void require_sums(const Tensor& rows, const Tensor& sums, const Config& config) {
  require_row_fits(rows, config);
  require_same_type(sums, rows);
  require_cols(sums, rows.cols, "columns of ", rows.name);
  require_tokens_fit(sums, config);
}

void require_vector(const Tensor& tensor, std::int64_t size, const char* what) {
  if (tensor) require_rows(tensor, size, what);
}

// Checks scales that the caller gives, and the tensor in which they arrive.
void require_scales(const Tensor& scales, const Tensor& received, const Tensor& rows,
                    const Config& config) {
  require_together(scales, received);
  if (!scales) return;
  require_same_type(received, scales);
  require_rows(scales, rows.rows, "rows of ", rows.name);
  require_cols(received, scales.cols, "columns of ", scales.name);
  XD_REQUIRE(received.row_bytes() >= 1 && received.row_bytes() <= config.max_scale_bytes,
             received.name, ": a row has ", received.row_bytes(),
             " bytes, expected 1 to max_scale_bytes = ", config.max_scale_bytes);
  require_fp4_scales(scales, rows);
}

// Checks the types, columns and scales that a way of quantising asks for.
void require_quantised(const DispatchCall& call) {
  const QuantiseFormat format = quantise_format(call.quantise);
  constexpr const char* kWay = ": quantise = XD_EP_QUANTISE_";
  const char* way = quantise_name(call.quantise);
  const auto require_type = [&](const Tensor& tensor, DType type) {
    XD_REQUIRE(tensor.type == type, tensor.name, ": is ", dtype_name(tensor.type), ", expected ",
               dtype_name(type), kWay, way);
  };
  require_type(call.tokens, DType::bf16);
  require_type(call.recv_tokens, DType::e4m3);
  XD_REQUIRE(!call.scales, "scales: given, expected NULL", kWay, way);
  XD_REQUIRE(call.tokens.cols % format.block == 0, "tokens: has ", call.tokens.cols,
             " columns, expected a multiple of ", format.block, kWay, way);
  XD_REQUIRE(call.recv_scales, "recv_scales = NULL, expected a tensor", kWay, way);
  if (format.scale_bytes == 4) {
    require_type(call.recv_scales, DType::f32);
  } else {
    XD_REQUIRE(call.recv_scales.type != DType::f32,
               "recv_scales: is float32, expected float8_e8m0fnu or uint8", kWay, way);
  }
  const std::int64_t blocks = call.tokens.cols / format.block;
  XD_REQUIRE(call.recv_scales.cols == blocks, "recv_scales: has ", call.recv_scales.cols,
             " columns, expected ", blocks, " (hidden / ", format.block, ")");
}

void read_dispatch_scales(const xd_ep_dispatch_args& a, const Reader& reader, const Config& config,
                          DispatchCall& call) {
  const int way = raw_enum(a.quantise);
  XD_REQUIRE(way >= XD_EP_QUANTISE_NONE && way <= XD_EP_QUANTISE_MXFP8, "quantise = ", way,
             ", expected an xd_ep_quantise, 0 to ", int{XD_EP_QUANTISE_MXFP8});
  call.quantise = a.quantise;
  call.scales = reader.optional(a.scales, "scales", 2, kGivenScaleTypes, Fit::input);
  call.recv_scales =
      reader.optional(a.recv_scales, "recv_scales", 2, kGivenScaleTypes, Fit::output);
  if (call.quantise != XD_EP_QUANTISE_NONE) return require_quantised(call);
  XD_REQUIRE(call.tokens.type != DType::bf16 || call.recv_tokens.type != DType::e4m3,
             "quantise = XD_EP_QUANTISE_NONE, expected another xd_ep_quantise: tokens are bfloat16 "
             "and recv_tokens float8_e4m3fn");
  require_same_type(call.recv_tokens, call.tokens);
  require_scales(call.scales, call.recv_scales, call.tokens, config);
}

void read_dispatch_weights(const xd_ep_dispatch_args& a, const Reader& reader, const Config& config,
                           DispatchCall& call) {
  call.topk_weights = reader.optional(a.topk_weights, "topk_weights", 2, kWeightTypes);
  call.recv_weights = reader.recv_weights(a.recv_weights, "recv_weights");
  require_together(call.topk_weights, call.recv_weights);
  XD_REQUIRE(a.recv_topk_idx == nullptr || config.layout.choices_beside_rows,
             "recv_topk_idx: given in ", config.layout.name,
             ", expected NULL: a row's zone is its expert");
  call.recv_topk_idx = reader.optional(a.recv_topk_idx, "recv_topk_idx", 2, kIndexTypes);
  if (call.topk_weights) {
    require_rows(call.topk_weights, call.tokens.rows, "rows of tokens");
    require_topk_fits(call.topk_weights, config);
  }
}

// Reads `part` and `num_sms`. The operation compares the part with its plan.
template <class Args>
Portion read_portion(const Args& a, const Config& config) {
  XD_REQUIRE(a.part >= 0 && a.part <= kMaxParts, "part = ", a.part,
             ", expected 0 (all) or a part of the plan, at most ", kMaxParts);
  XD_REQUIRE(a.part == 0 || config.layout.has_zones, "part = ", a.part, ": given in ",
             config.layout.name, ", expected 0: parts are parts of its zones");
  XD_REQUIRE(a.num_sms >= 0, "num_sms = ", a.num_sms, ", expected 0 (as the group) or more");
  XD_REQUIRE(config.num_sms == 0 || a.num_sms <= config.num_sms, "num_sms = ", a.num_sms,
             ", expected at most config.num_sms = ", config.num_sms);
  return {a.part, a.num_sms};
}

int read_parts(std::int32_t given, const Config& config) {
  const int most = config.most_parts();
  XD_REQUIRE(given >= 0 && given <= most, "parts = ", given, ", expected 0 to ", most,
             config.layout.has_zones
                 ? concat(": the smaller of ", kMaxParts, " and the fewest experts of a rank, ",
                          config.expert_tables.least_local_experts())
                 : concat(" in ", config.layout.name));
  return std::max(given, 1);
}

int read_alignment(std::int32_t given, const Config& config) {
  XD_REQUIRE(
      given >= 0 && std::popcount(static_cast<unsigned>(given)) <= 1 && given <= config.alignment,
      "alignment = ", given, ", expected 0 or a power of two up to the group's ", config.alignment);
  return given != 0 ? given : static_cast<int>(config.alignment);
}

}  // namespace

PrepareCall read_prepare(const xd_ep_prepare_args* args, const CallContext& context) {
  const auto a = read_struct("args", args, xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
  const Config& config = *context.config;
  const Reader reader(context);
  PrepareCall call{.topk_idx = reader.required(a.topk_idx, "topk_idx", 2, kIndexTypes),
                   .plan = static_cast<std::byte*>(a.plan),
                   .alignment = read_alignment(a.alignment, config),
                   .parts = read_parts(a.parts, config),
                   .counts = reader.numbers(a.counts, "counts", 1),
                   .padded_counts = reader.numbers(a.padded_counts, "padded_counts", 1),
                   .offsets = reader.numbers(a.offsets, "offsets", 1),
                   .total = reader.numbers(a.total, "total", 1),
                   .rank_rows = reader.numbers(a.rank_rows, "rank_rows", 2),
                   .replica_hint = {}};
  require_tokens_fit(call.topk_idx, config);
  require_topk_fits(call.topk_idx, config);
  call.replica_hint = read_replica_hint(a.replica_hint, call.topk_idx.rows, config, context.device);
  XD_REQUIRE(a.plan != nullptr, "plan = NULL, expected ", plan_size(config), " bytes");
  XD_REQUIRE(reinterpret_cast<std::uintptr_t>(a.plan) % 16 == 0, "plan is at ", a.plan,
             ", expected a 16-byte aligned address");
  XD_REQUIRE(a.plan_bytes >= plan_size(config), "plan_bytes = ", a.plan_bytes,
             ", expected at least xd_ep_plan_size = ", plan_size(config));
  require_vector(call.counts, config.local_experts, "local experts");
  require_vector(call.padded_counts, config.local_experts, "local experts");
  require_vector(call.offsets, config.local_experts + 1, "local experts + 1");
  require_vector(call.total, 1, "one number");
  if (call.rank_rows) {
    require_rows(call.rank_rows, config.ranks, "ranks");
    require_cols(call.rank_rows, config.ranks, "ranks");
  }
  return call;
}

DispatchCall read_dispatch(const xd_ep_dispatch_args* args, const CallContext& context) {
  auto a = read_struct("args", args, xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
  if (!has_part(a)) a.part = 0;
  const Config& config = *context.config;
  const Reader reader(context);
  DispatchCall call;
  call.plan = read_plan(a.plan, a.plan_bytes);
  call.portion = read_portion(a, config);
  call.tokens = reader.rows(a.tokens, "tokens", kMovedTypes);
  call.recv_tokens = reader.rows(a.recv_tokens, "recv_tokens", kMovedTypes);
  require_tokens_fit(call.tokens, config);
  require_row_fits(call.tokens, config);
  require_cols(call.recv_tokens, call.tokens.cols, "columns of tokens");
  read_dispatch_scales(a, reader, config, call);
  read_dispatch_weights(a, reader, config, call);
  return call;
}

CombineCall read_combine(const xd_ep_combine_args* args, const CallContext& context) {
  const auto a = read_struct("args", args, xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
  const Reader reader(context);
  CombineCall call{.plan = read_plan(a.plan, a.plan_bytes),
                   .portion = read_portion(a, *context.config),
                   .expert_out = reader.reducible(a.expert_out, "expert_out"),
                   .weights = reader.row_weights(a.weights, "weights"),
                   .out = reader.reducible(a.out, "out"),
                   .wire = read_wire(a.wire, *context.config)};
  require_sums(call.expert_out, call.out, *context.config);
  require_wire_fits(call.wire, call.expert_out.name, call.expert_out.cols);
  return call;
}

DispatchBwdCall read_dispatch_bwd(const xd_ep_dispatch_bwd_args* args, const CallContext& context) {
  const auto a = read_struct("args", args, xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  const Config& config = *context.config;
  const Reader reader(context);
  DispatchBwdCall call{
      .plan = read_plan(a.plan, a.plan_bytes),
      .portion = read_portion(a, config),
      .grad_recv_tokens =
          reader.rows(a.grad_recv_tokens, "grad_recv_tokens", kReducibleTypes, true),
      .grad_recv_weights = reader.recv_weights(a.grad_recv_weights, "grad_recv_weights"),
      .grad_tokens = reader.rows(a.grad_tokens, "grad_tokens", kReducibleTypes, true),
      .grad_topk_weights =
          reader.optional(a.grad_topk_weights, "grad_topk_weights", 2, kWeightTypes)};
  require_together(call.grad_recv_tokens, call.grad_tokens);
  require_together(call.grad_recv_weights, call.grad_topk_weights);
  XD_REQUIRE(call.grad_tokens || call.grad_topk_weights,
             "grad_tokens and grad_topk_weights are both NULL, expected at least one");
  if (call.grad_tokens) require_sums(call.grad_recv_tokens, call.grad_tokens, config);
  if (call.grad_topk_weights) {
    require_tokens_fit(call.grad_topk_weights, config);
    require_topk_fits(call.grad_topk_weights, config);
  }
  return call;
}

CombineBwdCall read_combine_bwd(const xd_ep_combine_bwd_args* args, const CallContext& context) {
  const auto a = read_struct("args", args, xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
  const Config& config = *context.config;
  const Reader reader(context);
  CombineBwdCall call{
      .plan = read_plan(a.plan, a.plan_bytes),
      .portion = read_portion(a, config),
      .grad_out = reader.rows(a.grad_out, "grad_out", kMovedTypes),
      .grad_out_scales =
          reader.optional(a.grad_out_scales, "grad_out_scales", 2, kGivenScaleTypes, Fit::input),
      .expert_out = reader.rows(a.expert_out, "expert_out", kReducibleTypes, true),
      .weights = reader.row_weights(a.weights, "weights"),
      .grad_expert_out = reader.rows(a.grad_expert_out, "grad_expert_out", kMovedTypes),
      .grad_expert_out_scales = reader.optional(a.grad_expert_out_scales, "grad_expert_out_scales",
                                                2, kGivenScaleTypes, Fit::output),
      .grad_weights = reader.row_weights(a.grad_weights, "grad_weights")};
  require_tokens_fit(call.grad_out, config);
  require_row_fits(call.grad_out, config);
  require_same_type(call.grad_expert_out, call.grad_out);
  require_cols(call.grad_expert_out, call.grad_out.cols, "columns of grad_out");
  require_scales(call.grad_out_scales, call.grad_expert_out_scales, call.grad_out, config);
  require_together(call.expert_out, call.grad_weights);
  if (call.weights) {
    constexpr const char* kMoved =
        ", expected NULL: rows of 8-bit elements or with scales are "
        "copied, weigh what arrives";
    XD_REQUIRE(dtype_bytes(call.grad_out.type) > 1, "weights: given with grad_out of ",
               dtype_name(call.grad_out.type), kMoved);
    XD_REQUIRE(!call.grad_out_scales, "weights: given with grad_out_scales", kMoved);
  }
  if (call.expert_out) {
    XD_REQUIRE(call.weights, "weights = NULL, expected a tensor: grad_weights is given");
    require_same_type(call.expert_out, call.grad_out);
    require_cols(call.expert_out, call.grad_out.cols, "columns of grad_out");
  }
  return call;
}

}  // namespace xd::ep
