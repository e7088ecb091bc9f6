// combine_bwd: every rank writes its tokens' output gradients to the rows they came from, and where
// combine was weighted, the weights' gradients beside them.
//
// Where expert_out and grad_expert_out are both staged they share one area: a row is read (for its
// dot product) and then written by the one rank it belongs to, so neither gets in the other's way.
// Weights and their gradients likewise.
#include "ep/cpu/operations.h"

namespace xd::ep::cpu {

CombineBwdOp::CombineBwdOp(const Context& context, const CombineBwdCall& call)
    : PlanOperation(context, call.plan), call_(call) {
  require_tokens(call_.grad_out, plan_);
  grad_expert_out_ = receive(call_.grad_expert_out, own_map().rows);
  expert_out_ = receive(call_.expert_out, own_map().rows);
  weights_ = receive(call_.weights, own_map().weights);
  grad_weights_ = receive(call_.grad_weights, own_map().weights);
}

Record CombineBwdOp::record() const {
  Record record = plan_record(XD_EP_COMBINE_BWD);
  record.dtype = static_cast<std::uint8_t>(call_.grad_out.type);
  record.row_bytes = static_cast<std::uint32_t>(call_.grad_out.row_bytes());
  record.flags = static_cast<std::uint8_t>((call_.weights ? kHasWeights : 0) |
                                           (call_.grad_weights ? kHasGradWeights : 0));
  record.rows_in = grad_expert_out_.place();
  record.scales_in = expert_out_.place();
  record.weights_in = weights_.place();
  record.extra_in = grad_weights_.place();
  return record;
}

void CombineBwdOp::stage_in() {
  expert_out_.copy_in(plan_, config());
  weights_.copy_in(plan_, config());
}

void CombineBwdOp::move() {
  resolve_tensors(context_, {.row = call_.grad_out.row_bytes(),
                             .scales = call_.expert_out.row_bytes(),
                             .weights = call_.weights.row_bytes(),
                             .extra = call_.grad_weights.row_bytes()});
  store_ =
      store_for(static_cast<std::uint64_t>(plan_.header().recv_rows) * call_.grad_out.row_bytes());
  TokenRows rows;
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) {
    rows.gather(context_, plan_, t);
    if (rows.count == 0) continue;
    if (call_.weights) {
      send_scaled(t, rows);
    } else {
      send_copies(t, rows);
    }
  }
  rows::flush();
}

void CombineBwdOp::send_scaled(std::int64_t token, const TokenRows& rows) const {
  const std::uint64_t bytes = call_.grad_out.row_bytes();
  const auto columns = static_cast<std::size_t>(call_.grad_out.cols);
  const rows::Type type = row_type(call_.grad_out.type);
  const std::byte* grad = call_.grad_out.data + static_cast<std::uint64_t>(token) * bytes;
  for (int i = 0; i < rows.count; ++i) {
    const RowRef& ref = rows.list[static_cast<std::size_t>(i)].ref;
    const RankTensors& to = tensors(ref.rank);
    const std::uint64_t at = static_cast<std::uint64_t>(ref.row) * bytes;
    const float weight = reinterpret_cast<const float*>(to.weights)[ref.row];
    if (to.extra != nullptr) {
      reinterpret_cast<float*>(to.extra)[ref.row] = rows::dot(type, to.scales + at, grad, columns);
    }
    rows::scale(type, to.rows + at, grad, weight, columns, store_);
  }
}

void CombineBwdOp::send_copies(std::int64_t token, const TokenRows& rows) const {
  const std::uint64_t bytes = call_.grad_out.row_bytes();
  store_row(rows, call_.grad_out.data + static_cast<std::uint64_t>(token) * bytes, bytes, store_,
            [&](int r) { return tensors(r).rows; });
}

Setback CombineBwdOp::finish() {
  for (const ReceiveTensor* tensor : {&grad_expert_out_, &grad_weights_}) {
    tensor->copy_out(plan_, config());
    tensor->zero_gaps(plan_, config());
  }
  return {};
}

}  // namespace xd::ep::cpu
