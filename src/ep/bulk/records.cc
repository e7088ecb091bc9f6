#include "ep/bulk/records.h"

namespace xd::ep {
namespace {

Record record_in(xd_ep_operation operation) {
  Record record;
  record.call.operation = static_cast<std::uint8_t>(operation);
  return record;
}

Record of_rows(xd_ep_operation operation, const Tensor& rows) {
  Record record = record_in(operation);
  if (!rows) return record;
  record.dtype = static_cast<std::uint8_t>(rows.type);
  record.row_bytes = static_cast<std::uint32_t>(rows.row_bytes());
  return record;
}

std::uint8_t flags_of_scales(const Tensor& scales) {
  if (!scales) return 0;
  return static_cast<std::uint8_t>(kHasScales | (scales.type != DType::f32 ? kByteScales : 0));
}

}  // namespace

Record record_of(const PrepareCall& call) {
  Record record = record_in(XD_EP_PREPARE);
  record.row_bytes = static_cast<std::uint32_t>(call.alignment);
  record.extra =
      ChoiceShape{static_cast<int>(call.topk_idx.cols), call.parts > 1 ? call.parts : 0}.word();
  return record;
}

Record record_of(const SlotTable& table) {
  Record record = record_in(XD_EP_SET_PLACEMENT);
  record.fingerprint = table.hash();
  return record;
}

Record record_of(const DispatchCall& call) {
  Record record = of_rows(XD_EP_DISPATCH, call.tokens);
  record.extra =
      ScaleRow{call.quantise, static_cast<std::uint32_t>(call.recv_scales.row_bytes())}.word();
  record.flags = static_cast<std::uint8_t>(
      flags_of_scales(call.scales) | (call.topk_weights ? kHasWeights : 0) |
      (call.recv_topk_idx ? kHasIndices : 0) |
      (call.recv_topk_idx && call.recv_topk_idx.type == DType::i64 ? kWideIndices : 0));
  return record;
}

Record record_of(const CombineCall& call) {
  Record record = of_rows(XD_EP_COMBINE, call.out);
  record.extra = static_cast<std::uint32_t>(call.wire.wire);
  record.flags = static_cast<std::uint8_t>(call.weights ? kHasWeights : 0);
  return record;
}

Record record_of(const DispatchBwdCall& call) {
  Record record = of_rows(XD_EP_DISPATCH_BWD, call.grad_tokens);
  record.flags = static_cast<std::uint8_t>((call.grad_tokens ? kHasRows : 0) |
                                           (call.grad_topk_weights ? kHasWeights : 0));
  return record;
}

Record record_of(const CombineBwdCall& call) {
  Record record = of_rows(XD_EP_COMBINE_BWD, call.grad_out);
  record.extra = static_cast<std::uint32_t>(call.grad_out_scales.row_bytes());
  record.flags = static_cast<std::uint8_t>(flags_of_scales(call.grad_out_scales) |
                                           (call.weights ? kHasWeights : 0) |
                                           (call.grad_weights ? kHasGradWeights : 0));
  return record;
}

}  // namespace xd::ep
