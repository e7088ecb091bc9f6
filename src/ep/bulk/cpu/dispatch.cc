// dispatch: every rank writes its tokens' rows into their final places in the peers' tensors.
//
// A token's row is read once and stored to all its places, here and on other ranks. No other rank
// writes those rows; the receiver itself zeroes padding and tail, which no peer touches.
#include <algorithm>

#include "ep/bulk/cpu/operations.h"

namespace xd::ep::cpu {

DispatchOp::DispatchOp(const Context& context, const DispatchCall& call)
    : PlanOperation(context, call.plan, call.portion), call_(call) {
  require_tokens(call_.tokens, plan_);
  require_topk(call_.topk_weights, plan_);
  if (config().layout.choices_beside_rows) {
    require_topk(call_.recv_weights, plan_);
    require_topk(call_.recv_topk_idx, plan_);
  }
  recv_tokens_ = receive_rows(call_.recv_tokens);
  recv_scales_ = receive_beside(call_.recv_scales, own_map().scales);
  recv_weights_ = receive_beside(call_.recv_weights, own_map().weights);
  recv_topk_idx_ = receive_beside(call_.recv_topk_idx, own_map().indices);
  require_order(record_of(call_), {recv_tokens_.staged(), recv_scales_.staged()});
  list_rows(layout());
}

Record DispatchOp::record() const {
  Record record = plan_record();
  record.rows_in = recv_tokens_.place();
  record.scales_in = recv_scales_.place();
  record.weights_in = recv_weights_.place();
  record.extra_in = recv_topk_idx_.place();
  return record;
}

void DispatchOp::move() {
  resolve_tensors(
      context_, {.row = call_.recv_tokens.row_bytes(),
                 .scales = call_.recv_scales.row_bytes(),
                 .weights = call_.recv_weights.row_bytes(),
                 .extra = call_.recv_topk_idx ? call_.recv_topk_idx.cols * sizeof(std::int32_t) : 0,
                 .scale_alignment = dtype_bytes(call_.recv_scales.type)});
  store_ = store_for(static_cast<std::uint64_t>(plan_.header().recv_rows) *
                     call_.recv_tokens.row_bytes());
  spread(
      layout(), [&](std::int64_t t) { return read(t); },
      [&](const TokenData& token, const TokenRows& rows) { deliver(token, rows); });
}

// Quantised rows are made here: once for this machine, and once for each other one.
TokenData DispatchOp::read(std::int64_t t) const {
  TokenData token{.codes = plan_.codes(t),
                  .row = call_.tokens.data + at(t) * call_.tokens.row_bytes()};
  if (call_.topk_weights) {
    token.weights = call_.topk_weights.as<float>() + t * call_.topk_weights.cols;
  }
  if (call_.quantise == XD_EP_QUANTISE_NONE) {
    token.scales = read_scales(call_.scales, t);
    return token;
  }
  Scratch& scratch = context_.scratch;
  rows::quantise_e4m3(quantise_format(call_.quantise), scratch.quantised.data(),
                      scratch.quantised_scales.data(), token.row, at(call_.tokens.cols));
  token.row = scratch.quantised.data();
  token.scales = scratch.quantised_scales.data();
  return token;
}

void DispatchOp::deliver(const TokenData& token, const TokenRows& rows) const {
  store_row(rows, moved(), token.row, call_.recv_tokens.row_bytes(), store_,
            [&](int r) { return row_target(r); });
  store_scales(token.scales, call_.recv_scales.row_bytes(), rows);
  if (config().layout.choices_beside_rows) {
    store_choices(token, rows);
  } else {
    store_weights(token, rows);
  }
}

// EXPERT_MAJOR: one weight per row.
void DispatchOp::store_weights(const TokenData& token, const TokenRows& rows) const {
  if (token.weights == nullptr) return;
  for (int i = 0; i < rows.count; ++i) {
    if (!rows.is_due(i, false, moved())) continue;
    const TokenRows::Row& row = rows.list[static_cast<std::size_t>(i)];
    tensors(row.ref.rank).weights.array<float>()[row.ref.row] = token.weights[row.k];
  }
}

// RANK_MAJOR: per row, local expert and weight of each k that the row's rank holds.
void DispatchOp::store_choices(const TokenData& token, const TokenRows& rows) const {
  if (token.weights == nullptr && !call_.recv_topk_idx) return;
  const int topk = plan_.header().topk;
  for (int i = 0; i < rows.count; ++i) {
    const RowRef& row = rows.list[static_cast<std::size_t>(i)].ref;
    const RankTensors& to = tensors(row.rank);
    for (int k = 0; k < topk; ++k) {
      RowRef choice{};
      const bool here = context_.group.codec().decode(token.codes[k], choice) &&
                        choice.rank == row.rank && choice.row == row.row;
      const std::int64_t at = row.row * topk + k;
      if (token.weights != nullptr) {
        to.weights.array<float>()[at] = here ? token.weights[k] : 0.0f;
      }
      const int expert = here ? choice.expert : -1;
      if (!to.extra) continue;
      if (to.wide_indices) {
        to.extra.array<std::int64_t>()[at] = expert;
      } else {
        to.extra.array<std::int32_t>()[at] = expert;
      }
    }
  }
}

OperationError DispatchOp::complete() {
  const Scope scope = moved();
  recv_tokens_.fan_out(plan_, config(), scope);
  recv_scales_.fan_out(plan_, config(), scope);
  recv_weights_.copy_out(plan_, config(), scope);
  recv_topk_idx_.copy_out(plan_, config(), scope);
  for (const ReceiveTensor* tensor :
       {&recv_tokens_, &recv_scales_, &recv_weights_, &recv_topk_idx_}) {
    tensor->zero_gaps(plan_, config(), scope);
  }
  if (config().layout.choices_beside_rows) end_choices();
  advance();
  return {};
}

// RANK_MAJOR: past the last row indices are -1 and weights 0, with and without zero_tail.
void DispatchOp::end_choices() const {
  const std::int64_t rows = plan_.header().recv_rows;
  const auto fill = [&](const Tensor& tensor, auto value) {
    if (tensor)
      std::fill_n(tensor.as<decltype(value)>() + rows * tensor.cols,
                  (tensor.rows - rows) * tensor.cols, value);
  };
  fill(call_.recv_weights, 0.0f);
  if (call_.recv_topk_idx.type == DType::i64) {
    fill(call_.recv_topk_idx, std::int64_t{-1});
  } else {
    fill(call_.recv_topk_idx, std::int32_t{-1});
  }
}

}  // namespace xd::ep::cpu
