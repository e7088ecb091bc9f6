#include "ep/slots/record.h"

#include "base/error.h"
#include "ep/plan/quantise.h"

namespace xd::ep {
namespace {

LlRecord record_in(xd_ll_operation operation, DType type, std::uint64_t row_bytes) {
  LlRecord record;
  record.call.operation = static_cast<std::uint8_t>(operation);
  record.dtype = static_cast<std::uint8_t>(type);
  record.row_bytes = static_cast<std::uint32_t>(row_bytes);
  return record;
}

// Where rows do not go into slots.
void require_form_fits(const LlDispatchReceive& call, const LlRecord& sent) {
  XD_REQUIRE(static_cast<std::uint16_t>(call.max_tokens) == sent.max_tokens,
             "max_tokens = ", call.max_tokens, ", expected ", sent.max_tokens,
             ", as in the send half");
  const bool weighted = (sent.flags & kWeighted) != 0;
  XD_REQUIRE(bool{call.recv_weights} == weighted, "recv_weights",
             weighted ? " = NULL, expected a tensor: topk_weights are given"
                      : ": given, expected NULL: topk_weights are not");
  if (call.by_rank && weighted) require_cols(call.recv_weights, sent.topk, "columns of topk_idx");
  if (call.recv_topk_idx) require_cols(call.recv_topk_idx, sent.topk, "columns of topk_idx");
}

// Where rows are not quantised.
void require_scales_fit(const SlotTensor& received, const LlRecord& sent) {
  const LlScales scales = LlScales::of(sent.quantise);
  XD_REQUIRE(bool{received} == bool{scales}, "recv_scales",
             scales ? " = NULL, expected a tensor: scales are given"
                    : ": given, expected NULL: scales are not, and quantise is NONE");
  if (!scales) return;
  require_type(received, static_cast<DType>(sent.scale_type));
  require_columns(received, scales.columns, "columns of scales");
}

}  // namespace

LlRecord record_of(const LlDispatchSend& call) {
  LlRecord record = record_in(XD_LL_DISPATCH, call.tokens.type, call.tokens.row_bytes());
  record.quantise = static_cast<std::uint16_t>(call.quantise);
  if (const Tensor& scales = call.scales) {
    const auto element = static_cast<std::uint32_t>(dtype_bytes(scales.type));
    record.quantise = LlScales{static_cast<std::uint32_t>(scales.cols), element}.word();
    record.scale_type = static_cast<std::uint64_t>(scales.type);
  }
  record.max_tokens = static_cast<std::uint16_t>(call.max_tokens);
  record.topk = static_cast<std::uint32_t>(call.topk_idx.cols);
  record.tokens = static_cast<std::uint32_t>(call.tokens.rows);
  record.flags = call.topk_weights ? kWeighted : 0;
  return record;
}

LlRecord record_of(const LlCombineSend& call, int topk, int tokens) {
  LlRecord record = record_in(XD_LL_COMBINE, call.expert_out.type, call.expert_out.row_bytes());
  record.topk = static_cast<std::uint32_t>(topk);
  record.tokens = static_cast<std::uint32_t>(tokens);
  record.quantise = static_cast<std::uint16_t>(call.wire.wire);
  record.flags = call.topk_weights ? kWeighted : 0;
  return record;
}

std::uint64_t sent_row_bytes(const LlRecord& dispatch) {
  const std::uint64_t bytes = dispatch.row_bytes;
  return quantise_format(quantise_of(dispatch)) ? bytes / dtype_bytes(DType::bf16) : bytes;
}

std::uint64_t sent_scale_bytes(const LlRecord& dispatch) {
  const QuantiseFormat format = quantise_format(quantise_of(dispatch));
  return format ? format.scale_row_bytes(sent_row_bytes(dispatch))
                : LlScales::of(dispatch.quantise).row_bytes();
}

void require_fits(const LlDispatchReceive& call, const LlRecord& sent) {
  const xd_ep_quantise way = quantise_of(sent);
  XD_REQUIRE(call.quantise == way, "quantise = XD_EP_QUANTISE_", quantise_name(call.quantise),
             ", expected XD_EP_QUANTISE_", quantise_name(way), ", as in the send half");
  const auto type = static_cast<DType>(sent.dtype);
  const std::uint64_t columns = sent.row_bytes / dtype_bytes(type);
  const bool quantises = way != XD_EP_QUANTISE_NONE;
  XD_REQUIRE(quantises || type != DType::bf16 || call.recv_tokens.type != DType::e4m3,
             "quantise = XD_EP_QUANTISE_NONE, expected another xd_ep_quantise: tokens are bfloat16 "
             "and recv_tokens float8_e4m3fn");
  require_type(call.recv_tokens, quantises ? DType::e4m3 : type);
  require_columns(call.recv_tokens, columns, "columns of tokens");
  if (!quantises) require_scales_fit(call.recv_scales, sent);
  if (call.max_tokens != 0) require_form_fits(call, sent);
}

void require_fits(const LlCombineReceive& call, const LlRecord& sent) {
  const auto type = static_cast<DType>(sent.dtype);
  XD_REQUIRE(call.out.type == type, "out: is ", dtype_name(call.out.type), ", expected ",
             dtype_name(type), ", as expert_out");
  XD_REQUIRE(call.out.row_bytes() == sent.row_bytes, "out: has ", call.out.cols,
             " columns, expected ", sent.row_bytes / dtype_bytes(type), " (columns of expert_out)");
  XD_REQUIRE(static_cast<std::uint16_t>(call.wire.wire) == sent.quantise, "wire = XD_EP_WIRE_",
             wire_name(call.wire.wire), ", expected XD_EP_WIRE_",
             wire_name(static_cast<xd_ep_wire>(sent.quantise)), ", as in the send half");
}

}  // namespace xd::ep
