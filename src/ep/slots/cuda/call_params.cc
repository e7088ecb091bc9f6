#include "ep/slots/cuda/call_params.h"

#include <algorithm>
#include <cstdlib>

#include "base/error.h"
#include "base/math.h"
#include "ep/plan/plan_check.h"
#include "ep/slots/cuda/shape.h"

namespace xd::ep::cuda {
namespace {

using Claim = xd::cuda::KnownMemory::Claim;

using xd::cuda::claim;

std::int64_t stride_bytes(const SlotTensor& tensor, std::int64_t stride) {
  return stride * static_cast<std::int64_t>(dtype_bytes(tensor.type));
}

// The memory from a tensor's first element to its last, for any strides.
Claim claim(const SlotTensor& tensor) {
  if (!tensor || tensor.bytes() == 0) return {tensor.name, tensor.data, 0};
  std::int64_t lowest = 0, highest = 0;
  const auto reach = [&](std::int64_t count, std::int64_t stride) {
    const std::int64_t span = (count - 1) * stride_bytes(tensor, stride);
    lowest += std::min<std::int64_t>(span, 0);
    highest += std::max<std::int64_t>(span, 0);
  };
  reach(tensor.experts, tensor.expert_stride);
  reach(tensor.slots, tensor.slot_stride);
  reach(tensor.cols, tensor.col_stride);
  return {tensor.name, tensor.data + lowest,
          static_cast<std::size_t>(highest - lowest) + dtype_bytes(tensor.type)};
}

LlSlots slots_of(const SlotTensor& tensor) {
  if (!tensor) return {};
  return {.data = tensor.data,
          .expert_stride = stride_bytes(tensor, tensor.expert_stride),
          .slot_stride = stride_bytes(tensor, tensor.slot_stride),
          .col_stride = stride_bytes(tensor, tensor.col_stride)};
}

// N of a tensor [N,H], as far as rows have numbers.
std::int32_t rows_of(const SlotTensor& tensor) {
  return static_cast<std::int32_t>(std::min<std::int64_t>(tensor.slots, INT32_MAX));
}

template <class T>
T* given(const Tensor& tensor) {
  return tensor ? tensor.as<T>() : nullptr;
}

// The parts of a group's plan have their places by the group's bounds, so all of it must be there.
void add_plan(const PlanBytes& plan, std::size_t plan_bytes, xd::cuda::KnownMemory& known,
              LlCombineParams& params) {
  require_plan_bytes(plan.data, plan.bytes);
  XD_REQUIRE(plan.bytes >= plan_bytes, "plan_bytes = ", plan.bytes,
             ", expected at least xd_ll_plan_size = ", plan_bytes);
  known.require({{"plan", plan.data, plan_bytes}});
  params.plan = static_cast<const std::byte*>(plan.data);
  params.plan_bytes = plan.bytes;
  params.head = LlPlanHead::of(params.group.terms, params.group.plan.end);
}

void add_wire(const WireFormat& wire, LlCombineParams& p) {
  p.form = wire.codes ? LlForm::codes : wire.is_float() ? LlForm::floats : LlForm::same;
  p.codes = wire.codes;
  p.record.quantise = static_cast<std::uint16_t>(wire.wire);
}

LlCombineRoute route_of(const LlCombineParams& p) {
  const LlDevice& g = p.group;
  const std::uint64_t item_bytes = ll_item_bytes(g.max_topk);
  const std::uint32_t vectors = p.row_bytes / ll_vector_bytes(p.form, static_cast<DType>(p.type));
  LlCombineRoute r{};
  r.weighs = (p.record.flags & kWeighted) != 0;
  r.dependent = g.dependent;
  r.item_bytes = static_cast<std::uint32_t>(item_bytes);
  r.most_items = static_cast<std::uint32_t>((g.ranks() - 1) * g.max_tokens);
  r.facts = p.plan + g.plan.facts;
  r.items = p.plan + g.plan.items;
  r.own_items = r.items + r.most_items * item_bytes;
  r.home = p.plan + g.plan.home;
  r.row_parts = LlDivisor::of((std::int64_t{vectors} + kLlPartVectors - 1) / kLlPartVectors);
  r.topk = static_cast<std::uint32_t>(g.max_topk);
  r.max_tokens = g.max_tokens;
  r.rank = g.rank();
  r.ranks = g.ranks();
  r.vectors = vectors;
  r.rows = p.expert_out.data;
  r.places = static_cast<std::uint32_t>(g.max_tokens * g.partials_per_token());
  r.partials_per_token = g.partials_per_token();
  r.partial_stride = static_cast<std::uint32_t>(g.map.partial_stride);
  r.own_area = g.own_area;
  return r;
}

// A launch with all that combine/quick.cuh asks for. Strides that fit 32 bits are set.
bool is_quick(LlCombineParams& p, const SlotTensor& rows) {
  const LlDevice& g = p.group;
  const auto fits = [](std::int64_t stride, std::int64_t count) {
    return stride % 16 == 0 && std::abs(stride / 16 * count) <= INT32_MAX / 2;
  };
  const std::int64_t experts = p.expert_out.expert_stride, slots = p.expert_out.slot_stride;
  if (!p.step.send || !p.step.receive || g.masks || g.ranks() > kLlFewRanks) return false;
  if (g.num_hosts > 1 || p.form == LlForm::floats) return false;
  if (2 + 2 * g.max_topk > 32 || p.route.vectors > kLlMoverThreads) return false;
  if (!fits(experts, rows.experts) || !fits(slots, rows.slots)) return false;
  p.route.expert_stride = static_cast<std::int32_t>(experts / 16);
  p.route.slot_stride = static_cast<std::int32_t>(slots / 16);
  return true;
}

void add_rows(const LlDispatchReceive& call, xd::cuda::KnownMemory& known, LlDispatchParams& p) {
  known.require(
      {claim(call.row_offsets, true), claim(call.recv_weights), claim(call.recv_topk_idx)});
  const Tensor& choices = call.recv_topk_idx ? call.recv_topk_idx : call.recv_weights;
  p.rows = {.by_rank = call.by_rank,
            .wide_topk = call.recv_topk_idx && call.recv_topk_idx.type == DType::i64,
            .alignment = static_cast<std::int32_t>(p.group.terms.alignment),
            .rows = rows_of(call.recv_tokens),
            .topk = call.by_rank && choices ? static_cast<std::int32_t>(choices.cols) : 0,
            .row_offsets = call.row_offsets.as<std::int64_t>(),
            .recv_weights = given<float>(call.recv_weights),
            .recv_topk_idx = given<void>(call.recv_topk_idx)};
}

// Words of all ones are a NaN in rows of numbers, and may be anything in others.
bool is_given(DType type, bool has_scales) {
  return has_scales || (type != DType::bf16 && type != DType::f16 && type != DType::f32);
}

void add_given(const LlDispatchSend& call, xd::cuda::KnownMemory& known, LlGivenParams& p) {
  const Tensor& scales = call.scales;
  known.require({claim(scales)});
  p.given = true;
  p.given_form =
      LlGivenForm::of(p.record.row_bytes, static_cast<std::uint32_t>(scales.row_bytes()));
  p.form.scale_words = p.given_form.words();
  const std::uint64_t bytes = p.form.payload() + std::uint64_t{p.form.tail_words()} * 8;
  if (bytes > p.group.map.row_stride) {
    fail(XD_ERROR_UNSUPPORTED, "tokens: a row has ", bytes,
         " bytes with scales, weights and escapes on CUDA devices, expected at most ",
         p.group.map.row_stride, ", the room of this group's rows");
  }
  if (!scales) return;
  const std::uint64_t element = dtype_bytes(scales.type);
  p.scales = scales.data;
  p.scale_row_stride = scales.row_stride * static_cast<std::int64_t>(element);
  p.scale_col_stride = scales.col_stride * static_cast<std::int64_t>(element);
  p.scale_element = static_cast<std::uint32_t>(element);
  p.scale_columns = static_cast<std::uint32_t>(scales.cols);
}

void add_given(const LlDispatchReceive& call, LlGivenParams& p) {
  const SlotTensor& scales = call.recv_scales;
  p.given = true;
  p.given_form = LlGivenForm::of(p.recv_row_bytes,
                                 static_cast<std::uint32_t>(scales ? scales.row_bytes() : 0));
  if (!scales) return;
  p.record.quantise = LlScales{p.scale_columns, p.scale_element}.word();
  p.record.scale_type = static_cast<std::uint64_t>(scales.type);
}

}  // namespace

void add_send(const LlDispatchSend& call, xd::cuda::KnownMemory& known, LlGivenParams& p) {
  known.require({claim(call.tokens), claim(call.topk_idx), claim(call.topk_weights),
                 claim(call.replica_hint)});
  p.record = record_of(call);
  p.tokens = call.tokens.data;
  p.topk_idx = call.topk_idx.data;
  p.wide_ids = call.topk_idx.type == DType::i64;
  p.topk_weights = given<const float>(call.topk_weights);
  p.format = quantise_format(call.quantise);
  p.form = ll_row_form(p.record.row_bytes,
                       static_cast<std::uint32_t>(p.format.scale_row_bytes(at(call.tokens.cols))),
                       static_cast<bool>(p.format),
                       call.topk_weights ? static_cast<int>(p.record.topk) : 0);
  if (is_given(call.tokens.type, bool{call.scales})) add_given(call, known, p);
}

void add_receive(const LlDispatchReceive& call, std::size_t plan_bytes,
                 xd::cuda::KnownMemory& known, LlGivenParams& p) {
  known.require({{"plan", call.plan, plan_bytes},
                 claim(call.recv_tokens),
                 claim(call.recv_scales),
                 claim(call.counts, true),
                 claim(call.source_ranges, true),
                 claim(call.source_tokens),
                 claim(call.expert_load, true),
                 claim(call.wait_ns, true)});
  p.record.quantise = static_cast<std::uint16_t>(call.quantise);
  p.record.max_tokens = static_cast<std::uint16_t>(call.max_tokens);
  p.format = quantise_format(call.quantise);
  p.recv_type = static_cast<std::uint8_t>(call.recv_tokens.type);
  p.recv_row_bytes = static_cast<std::uint32_t>(call.recv_tokens.row_bytes());
  p.plan = call.plan;
  p.recv_tokens = slots_of(call.recv_tokens);
  p.recv_scales = slots_of(call.recv_scales);
  p.scale_element = call.recv_scales
                        ? static_cast<std::uint32_t>(dtype_bytes(call.recv_scales.type))
                        : sizeof(float);
  p.scale_columns = static_cast<std::uint32_t>(call.recv_scales ? call.recv_scales.cols : 0);
  p.counts = given<std::int32_t>(call.counts);
  p.source_ranges = given<std::int64_t>(call.source_ranges);
  p.source_tokens = given<std::int32_t>(call.source_tokens);
  p.expert_load = given<void>(call.expert_load);
  p.wide_load = call.expert_load && call.expert_load.type == DType::i64;
  p.wait_ns = given<std::int64_t>(call.wait_ns);
  if (call.row_offsets) add_rows(call, known, p);
  if (call.quantise == XD_EP_QUANTISE_NONE &&
      is_given(call.recv_tokens.type, bool{call.recv_scales})) {
    add_given(call, p);
  }
}

void add_send(const LlCombineSend& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known,
              LlCombineParams& p) {
  add_plan(call.plan, plan_bytes, known, p);
  known.require({claim(call.expert_out), claim(call.topk_weights)});
  // The plan's own numbers are filled in by the kernel.
  p.record = record_of(call, 0, 0);
  p.expert_out = slots_of(call.expert_out);
  const bool has_slots = p.group.terms.layout == ll_layout(XD_LL_SLOTS);
  if (!has_slots) p.most_rows = rows_of(call.expert_out);
  p.slots = LlDivisor::of(has_slots ? call.expert_out.slots : p.most_rows);
  p.topk_weights = given<const float>(call.topk_weights);
  p.weight_rows = static_cast<int>(call.topk_weights.rows);
  p.weight_cols = static_cast<int>(call.topk_weights.cols);
  p.row_bytes = static_cast<std::uint32_t>(call.expert_out.row_bytes());
  p.type = static_cast<std::uint8_t>(call.expert_out.type);
  add_wire(call.wire, p);
  p.route = route_of(p);
  const bool has_rows = call.expert_out.slots > 0;
  p.route.local_experts = has_rows ? static_cast<std::uint32_t>(call.expert_out.experts) : 0;
  p.route.quick = is_quick(p, call.expert_out);
}

void add_receive(const LlCombineReceive& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known,
                 LlCombineParams& p) {
  add_plan(call.plan, plan_bytes, known, p);
  known.require({claim(call.out), claim(call.wait_ns, true)});
  p.out = call.out.data;
  p.out_rows = static_cast<int>(call.out.rows);
  p.row_bytes = static_cast<std::uint32_t>(call.out.row_bytes());
  p.type = static_cast<std::uint8_t>(call.out.type);
  add_wire(call.wire, p);
  p.wait_ns = given<std::int64_t>(call.wait_ns);
}

}  // namespace xd::ep::cuda
