// combine and dispatch_bwd: every rank reads its tokens' rows from the peers' tensors and sums
// them.
//
// Reading a peer's memory costs as much as reading its own, so the partial sums of tensors that are
// used in place are formed by the rank that needs them. Where rows are staged, and so copied
// anyway, their owner forms the partial sums while it copies. Order and roundings are the same.
#include "base/math.h"
#include "ep/cpu/operations.h"

namespace xd::ep::cpu {

namespace {

// The terms of one token's sum.
struct TokenTerms {
  std::array<const void*, kMaxTopk> rows;
  std::array<float, kMaxTopk> weights;
  std::array<int, kMaxTopk> ends;
  std::array<int, kMaxTopk> host_ends;
  int num_rows = 0;
  int num_partials = 0;
  int num_hosts = 0;  // 0: sums are not made by host

  void collect(const Context& context, const PlanView& plan, const Tensor& out, bool weighted,
               std::int64_t token) {
    TokenRows places;
    places.gather(context, plan, token);
    const bool by_host = context.group.sums_by_host();
    const HostMap& hosts = context.group.comm().hosts();
    if (by_host) places.order_by_host(hosts);
    num_rows = 0;
    num_partials = 0;
    num_hosts = 0;
    for (int i = 0; i < places.count; ++i) {
      const RowRef& ref = places.list[at(i)].ref;
      const RankTensors& from = context.scratch.ranks[at(ref.rank)];
      const bool first = places.first_of_rank(i);
      // The owner has added up the token's rows, weighted, in the place of the first.
      if (from.one_row_per_token && !first) continue;
      rows[at(num_rows)] = from.rows.address(at(ref.row) * out.row_bytes());
      if (weighted) {
        weights[at(num_rows)] =
            from.one_row_per_token ? 1.0f : from.weights.array<float>()[ref.row];
      }
      // A rank's rows follow one another and form one partial sum.
      if (!first) --num_partials;
      ++num_rows;
      ends[at(num_partials++)] = num_rows;
      if (!by_host) continue;
      if (i > 0 && hosts.host_of(places.list[at(i - 1)].ref.rank) == hosts.host_of(ref.rank)) {
        --num_hosts;
      }
      host_ends[at(num_hosts++)] = num_partials;
    }
  }
};

}  // namespace

void sum_rows(const Context& context, const PlanView& plan, const Tensor& out, bool weighted) {
  const std::uint64_t bytes = out.row_bytes();
  const rows::Store store = store_for(out.bytes());
  const std::int64_t tokens = plan.header().tokens;
  // A token's rows lie anywhere in the peers' memory: while one token is summed, the next one's
  // rows are fetched.
  std::array<TokenTerms, 2> terms;
  if (tokens > 0) terms[0].collect(context, plan, out, weighted, 0);
  for (std::int64_t t = 0; t < tokens; ++t) {
    const TokenTerms& now = terms[at(t % 2)];
    TokenTerms& next = terms[at((t + 1) % 2)];
    next.num_rows = 0;
    if (t + 1 < tokens) next.collect(context, plan, out, weighted, t + 1);
    std::byte* sum = out.data + at(t) * bytes;
    if (now.num_partials == 0) {
      rows::zero(sum, bytes, store);
      continue;
    }
    rows::sum(row_type(out.type), sum,
              {.rows = now.rows.data(),
               .weights = weighted ? now.weights.data() : nullptr,
               .partial_ends = now.ends.data(),
               .num_partials = now.num_partials,
               .host_ends = now.num_hosts > 0 ? now.host_ends.data() : nullptr,
               .num_hosts = now.num_hosts,
               .next_rows = {next.rows.data(), at(next.num_rows)}},
              static_cast<std::size_t>(out.cols), store);
  }
  rows::flush();
}

CombineOp::CombineOp(const Context& context, const CombineCall& call)
    : SumOperation(context, call.plan), call_(call) {
  require_tokens(call_.out, plan_);
  receive(call_.expert_out, call_.weights);
}

void CombineOp::move() {
  resolve_tensors(context_, {.row = call_.out.row_bytes(), .weights = call_.weights.row_bytes()});
  sum_rows(context_, plan_, call_.out, static_cast<bool>(call_.weights));
}

DispatchBwdOp::DispatchBwdOp(const Context& context, const DispatchBwdCall& call)
    : SumOperation(context, call.plan), call_(call) {
  require_tokens(call_.grad_tokens, plan_);
  require_tokens(call_.grad_topk_weights, plan_);
  require_topk(call_.grad_topk_weights, plan_);
  if (config().layout.choices_beside_rows) require_topk(call_.grad_recv_weights, plan_);
  receive(call_.grad_recv_tokens, call_.grad_recv_weights);
}

void DispatchBwdOp::move() {
  resolve_tensors(context_, {.row = call_.grad_tokens.row_bytes(),
                             .weights = call_.grad_recv_weights.row_bytes()});
  if (call_.grad_tokens) sum_rows(context_, plan_, call_.grad_tokens, false);
  if (call_.grad_topk_weights) read_weights();
}

// Each choice's gradient comes from its own row (and in RANK_MAJOR from its own k there); choices
// without a row have none.
void DispatchBwdOp::read_weights() const {
  const int topk = plan_.header().topk;
  const bool by_choice = config().layout.choices_beside_rows;
  float* out = call_.grad_topk_weights.as<float>();
  for (std::int64_t t = 0; t < plan_.header().tokens; ++t) {
    const std::uint32_t* codes = plan_.codes(t);
    for (int k = 0; k < topk; ++k) {
      RowRef ref{};
      float& grad = out[t * topk + k];
      grad = 0.0f;
      if (!context_.group.codec().decode(codes[k], ref)) continue;
      const RankTensors& from = tensors(ref.rank);
      if (ref.row >= from.num_rows) continue;
      const std::int64_t at = by_choice ? ref.row * topk + k : ref.row;
      grad = from.weights.array<float>()[at];
    }
  }
}

}  // namespace xd::ep::cpu
