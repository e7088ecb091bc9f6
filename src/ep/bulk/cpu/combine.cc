// combine and dispatch_bwd: every rank reads its tokens' rows from the peers' tensors and sums
// them. Sums of other machines' rows are made there (ep/bulk/cpu/remote/sums.h).
//
// Reading a peer's memory costs as much as reading its own, so the partial sums of tensors that are
// used in place are formed by the rank that needs them. Where rows are staged, and so copied
// anyway, their owner forms the partial sums while it copies. Order and roundings are the same.
// Under a wire a sum that does not cross is put into the wire's form and back all the same.
#include <array>

#include "base/math.h"
#include "ep/bulk/cpu/operations.h"

namespace xd::ep::cpu {

void sum_rows(const Context& context, const PlanView& plan, const RemoteSums::Wish& wish) {
  const Tensor& out = wish.sums;
  const std::uint64_t bytes = out.row_bytes();
  const rows::Store store = store_for(out.bytes());
  const std::int64_t tokens = plan.header().tokens;
  const auto collect = [&](TokenTerms& terms, std::int64_t t) {
    terms.collect(context, {.codes = plan.codes(t),
                            .topk = plan.header().topk,
                            .row_bytes = bytes,
                            .weighted = wish.weighted,
                            .coded = static_cast<bool>(wish.wire)});
  };
  // A token's rows lie anywhere in the peers' memory: while one token is summed, the next one's
  // rows are fetched.
  std::array<TokenTerms, 2> terms;
  if (tokens > 0) collect(terms[0], 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    TokenTerms& next = terms[at((t + 1) % 2)];
    next.num_rows = 0;
    if (t + 1 < tokens) collect(next, t + 1);
    terms[at(t % 2)].sum(wish.shape(), out.data + at(t) * bytes, store,
                         {next.rows.data(), at(next.num_rows)});
  }
  rows::flush();
}

float weight_gradient(const Context& context, const std::uint32_t* codes, int topk, int k) {
  RowRef ref{};
  if (!context.group.codec().decode(codes[k], ref)) return 0.0f;
  const RankTensors& from = context.scratch.ranks[at(ref.rank)];
  if (ref.row >= from.num_rows) return 0.0f;
  const bool by_choice = context.group.config().layout.choices_beside_rows;
  return from.weights.array<float>()[by_choice ? ref.row * topk + k : ref.row];
}

void SumOperation::sum(const RemoteSums::Wish& wish) const {
  if (context_.lockstep.remote() == nullptr) {
    if (wish.sums) sum_rows(context_, plan_, wish);
    return;
  }
  RemoteSums(context_, plan_, wish).run();
}

CombineOp::CombineOp(const Context& context, const CombineCall& call)
    : SumOperation(context, call.plan, call.portion), call_(call) {
  require_tokens(call_.out, plan_);
  receive(record_of(call_), call_.expert_out, call_.weights);
  list_requests(wish());
}

void CombineOp::move() {
  if (!part().ends()) return;
  resolve_tensors(context_, {.row = call_.out.row_bytes(),
                             .weights = call_.weights.row_bytes(),
                             .added_up = adds_up(call_.wire)});
  sum(wish());
}

DispatchBwdOp::DispatchBwdOp(const Context& context, const DispatchBwdCall& call)
    : SumOperation(context, call.plan, call.portion), call_(call) {
  require_tokens(call_.grad_tokens, plan_);
  require_tokens(call_.grad_topk_weights, plan_);
  require_topk(call_.grad_topk_weights, plan_);
  if (config().layout.choices_beside_rows) require_topk(call_.grad_recv_weights, plan_);
  receive(record_of(call_), call_.grad_recv_tokens, call_.grad_recv_weights);
  list_requests(wish());
}

void DispatchBwdOp::move() {
  if (!part().ends()) return;
  resolve_tensors(context_, {.row = call_.grad_tokens.row_bytes(),
                             .weights = call_.grad_recv_weights.row_bytes()});
  if (call_.grad_topk_weights) read_weights();
  sum(wish());
}

// Each choice's gradient comes from its own row (and in RANK_MAJOR from its own k there); choices
// without a row have none, and those on other machines none yet.
void DispatchBwdOp::read_weights() const {
  const int topk = plan_.header().topk;
  float* out = call_.grad_topk_weights.as<float>();
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) {
    for (int k = 0; k < topk; ++k)
      out[t * topk + k] = weight_gradient(context_, plan_.codes(t), topk, k);
  }
}

}  // namespace xd::ep::cpu
