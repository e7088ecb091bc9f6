#include "ep/records.h"

namespace xd::ep {
namespace {

Record of_rows(xd_ep_operation operation, const Tensor& rows) {
  Record record{.operation = static_cast<std::uint8_t>(operation)};
  if (!rows) return record;
  record.dtype = static_cast<std::uint8_t>(rows.type);
  record.row_bytes = static_cast<std::uint32_t>(rows.row_bytes());
  return record;
}

}  // namespace

Record describe(const PrepareCall& call) {
  return {.operation = XD_EP_PREPARE,
          .row_bytes = static_cast<std::uint32_t>(call.alignment),
          .extra = static_cast<std::uint32_t>(call.topk_idx.cols)};
}

Record describe(const DispatchCall& call) {
  Record record = of_rows(XD_EP_DISPATCH, call.tokens);
  record.extra = static_cast<std::uint32_t>(call.recv_scales.row_bytes());
  record.flags = static_cast<std::uint8_t>(
      (call.quantise ? kQuantised : 0) | (call.scales ? kHasScales : 0) |
      (call.recv_scales && call.recv_scales.type != DType::f32 ? kByteScales : 0) |
      (call.topk_weights ? kHasWeights : 0) | (call.recv_topk_idx ? kHasIndices : 0) |
      (call.recv_topk_idx && call.recv_topk_idx.type == DType::i64 ? kWideIndices : 0));
  return record;
}

Record describe(const CombineCall& call) {
  Record record = of_rows(XD_EP_COMBINE, call.out);
  record.flags = static_cast<std::uint8_t>(call.weights ? kHasWeights : 0);
  return record;
}

Record describe(const DispatchBwdCall& call) {
  Record record = of_rows(XD_EP_DISPATCH_BWD, call.grad_tokens);
  record.flags = static_cast<std::uint8_t>((call.grad_tokens ? kHasRows : 0) |
                                           (call.grad_topk_weights ? kHasWeights : 0));
  return record;
}

Record describe(const CombineBwdCall& call) {
  Record record = of_rows(XD_EP_COMBINE_BWD, call.grad_out);
  record.flags = static_cast<std::uint8_t>((call.weights ? kHasWeights : 0) |
                                           (call.grad_weights ? kHasGradWeights : 0));
  return record;
}

}  // namespace xd::ep
