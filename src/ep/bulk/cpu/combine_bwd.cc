// combine_bwd: every rank writes its tokens' output gradients to the rows they came from, with
// their scales, and where combine was weighted, the weights' gradients beside them.
//
// Where grad_expert_out is staged in EXPERT_MAJOR, gradients cross as they are, once per token, and
// the owner of the rows does the rest: it has expert_out and weights at hand.
#include "base/math.h"
#include "ep/bulk/cpu/operations.h"

namespace xd::ep::cpu {

CombineBwdOp::CombineBwdOp(const Context& context, const CombineBwdCall& call)
    : PlanOperation(context, call.plan, call.portion), call_(call) {
  require_tokens(call_.grad_out, plan_);
  grad_expert_out_ = receive_rows(call_.grad_expert_out);
  grad_expert_out_scales_ = receive_beside(call_.grad_expert_out_scales, own_map().scales);
  expert_out_ = receive_rows(call_.expert_out);
  weights_ = receive_beside(call_.weights, own_map().weights);
  grad_weights_ = receive_beside(call_.grad_weights, own_map().weights);
  require_order(record_of(call_), {grad_expert_out_.staged(), grad_expert_out_scales_.staged()});
  list_rows(layout());
}

Record CombineBwdOp::record() const {
  Record record = plan_record();
  record.rows_in = grad_expert_out_.place();
  record.scales_in = call_.expert_out ? expert_out_.place() : grad_expert_out_scales_.place();
  record.weights_in = weights_.place();
  record.extra_in = grad_weights_.place();
  return record;
}

void CombineBwdOp::stage_in() {
  if (finishes_here()) return;
  expert_out_.copy_in(plan_, config(), moved());
  weights_.copy_in(plan_, config(), moved());
}

void CombineBwdOp::move() {
  resolve_tensors(
      context_,
      {.row = call_.grad_out.row_bytes(),
       .scales = call_.expert_out ? call_.expert_out.row_bytes()
                                  : call_.grad_expert_out_scales.row_bytes(),
       .weights = call_.weights.row_bytes(),
       .extra = call_.grad_weights.row_bytes(),
       .scale_alignment =
           call_.expert_out ? kRowAlignment : dtype_bytes(call_.grad_expert_out_scales.type)});
  store_ =
      store_for(static_cast<std::uint64_t>(plan_.header().recv_rows) * call_.grad_out.row_bytes());
  spread(
      layout(),
      [&](std::int64_t t) {
        return TokenData{.codes = plan_.codes(t),
                         .row = call_.grad_out.data + at(t) * call_.grad_out.row_bytes(),
                         .scales = read_scales(call_.grad_out_scales, t)};
      },
      [&](const TokenData& token, const TokenRows& rows) { deliver(token, rows); });
}

void CombineBwdOp::deliver(const TokenData& token, const TokenRows& rows) const {
  if (call_.weights) return send_scaled(token.row, rows);
  store_row(rows, moved(), token.row, call_.grad_out.row_bytes(), store_,
            [&](int r) { return row_target(r); });
  store_scales(token.scales, call_.grad_out_scales.row_bytes(), rows);
}

void CombineBwdOp::send_scaled(const std::byte* grad, const TokenRows& rows) const {
  const std::uint64_t bytes = call_.grad_out.row_bytes();
  for (int i = 0; i < rows.count; ++i) {
    const RowRef& ref = rows.list[at(i)].ref;
    const RankTensors& to = tensors(ref.rank);
    if (!rows.is_due(i, to.one_row_per_token, moved())) continue;
    std::byte* const row = to.rows.address(at(ref.row) * bytes);
    if (to.one_row_per_token) {
      rows::copy(row, grad, bytes, store_);
      continue;
    }
    WeightedRow finished{.weight = to.weights.array<float>()[ref.row], .grad_expert_out = row};
    if (to.extra) {
      finished.expert_out = to.scales.address(at(ref.row) * bytes);
      finished.grad_weight = to.extra.array<float>() + ref.row;
    }
    finish_row(grad, finished);
  }
}

// Finishes one row of a weighted combine: first the weight's gradient, then the row's.
void CombineBwdOp::finish_row(const std::byte* grad, const WeightedRow& row) const {
  const rows::Type type = rows::type_of(call_.grad_out.type);
  const auto columns = at(call_.grad_out.cols);
  if (row.grad_weight != nullptr) {
    *row.grad_weight = rows::dot(type, row.expert_out, grad, columns);
  }
  rows::scale(type, row.grad_expert_out, grad, row.weight, columns, store_);
}

// Finishes rows of a weighted combine that is staged in EXPERT_MAJOR, where the gradients of whole
// tokens crossed.
void CombineBwdOp::finish_rows() const {
  const std::uint64_t bytes = call_.grad_out.row_bytes();
  for_each_token(plan_, moved(), &PartSpan::first, [&](std::span<const std::uint32_t> rows, auto) {
    for (const std::uint32_t row : rows) {
      WeightedRow finished{.weight = call_.weights.as<float>()[row],
                           .grad_expert_out = call_.grad_expert_out.data + row * bytes};
      if (call_.grad_weights) {
        finished.expert_out = call_.expert_out.data + row * bytes;
        finished.grad_weight = call_.grad_weights.as<float>() + row;
      }
      finish_row(grad_expert_out_.crossed(rows[0]), finished);
    }
  });
  rows::flush();
}

OperationError CombineBwdOp::complete() {
  const Scope scope = moved();
  if (finishes_here()) {
    finish_rows();
  } else {
    grad_expert_out_.fan_out(plan_, config(), scope);
    grad_expert_out_scales_.fan_out(plan_, config(), scope);
    grad_weights_.copy_out(plan_, config(), scope);
  }
  grad_expert_out_.zero_gaps(plan_, config(), scope);
  grad_expert_out_scales_.zero_gaps(plan_, config(), scope);
  grad_weights_.zero_gaps(plan_, config(), scope);
  advance();
  return {};
}

}  // namespace xd::ep::cpu
