// Step: combine and combine_bwd.
#include <gtest/gtest.h>

#include <memory>

#include "conformance/step.h"

namespace xd::test {

void Step::combine() {
  const Format format = format_of(case_.dtype);
  const int me = rank_.rank;
  const std::int64_t rows = receive_rows(10);
  const std::int64_t columns = 16 * row_units_ / format.bytes;
  const bool weighted = case_.weights && case_.layout == XD_EP_EXPERT_MAJOR;
  const auto code = [&](int rank, std::int64_t r, std::int64_t column) {
    return float_code(element(Content::expert_out, rank, r, column), format);
  };
  const CodeAt row_code = [&](auto r, auto column) { return code(me, r, column); };
  const CodeAt weight_code = [&](auto r, auto) { return encode(weight_at(me, r), kFormatF32); };
  Tensor expert_out = receive_input(case_.dtype, {rows, columns}, row_code);
  Tensor weights = receive_input(kF32, {rows}, weight_code, Grain::elements);
  Tensor out = output(case_.dtype, {tokens(), columns}, false);

  xd_ep_combine_args args = XD_EP_COMBINE_ARGS_INIT;
  set_plan(args, plan_);
  args.expert_out = expert_out.dl();
  args.weights = weighted ? weights.dl() : nullptr;
  args.out = out.dl();
  args.wire = case_.wire;
  const ElementAt value = [&](int rank, std::int64_t r, std::int64_t column) {
    return decode(code(rank, r, column), format);
  };
  const WeightAt weight_of = [&](int rank, std::int64_t r) { return weight_at(rank, r); };
  const HostRanks hosts = ranks_by_host(rank_.hosts, case_.num_ranks);
  in_parts(args, [&] {
    if (part_ != 0) {
      write_received(expert_out, row_code);
      write_received(weights, weight_code);
    }
    expect_status(XD_EP_COMBINE, xd_ep_combine(group_, &args, rank_.stream()));
    if (case_.wire != XD_EP_WIRE_SAME) {
      return expect_tokens("out", out, under_wire(columns, value, weighted ? &weight_of : nullptr));
    }
    expect_tokens("out", out, [&](auto t, auto column) {
      return combined(routed_, hosts, {me, static_cast<int>(t)}, column, format, value,
                      weighted ? &weight_of : nullptr);
    });
  });
}

// Tokens are asked for one after another, and a token's blocks are made at once.
Step::CodeAt Step::under_wire(std::int64_t columns, const ElementAt& element,
                              const WeightAt* weight) const {
  const HostRanks hosts = ranks_by_host(rank_.hosts, case_.num_ranks);
  const auto row = std::make_shared<std::pair<std::int64_t, std::vector<std::uint32_t>>>(-1, 0);
  return [this, hosts, row, columns, element, weight](std::int64_t t, std::int64_t column) {
    if (row->first != t) {
      const TokenOf token{rank_.rank, static_cast<int>(t)};
      row->first = t;
      row->second = combined_under(
          case_.wire, hosts, columns, format_of(case_.dtype),
          [&](int rank) { return partial_sum(routed_, token, rank, columns, element, weight); });
    }
    return std::uint64_t{row->second[static_cast<std::size_t>(column)]};
  };
}

void Step::combine_bwd() {
  const Format format = format_of(case_.dtype);
  const int me = rank_.rank;
  const std::int64_t rows = receive_rows(11);
  const std::int64_t columns = 16 * row_units_ / format.bytes;
  const bool weighted = case_.weights && case_.layout == XD_EP_EXPERT_MAJOR;
  if (!weighted && case_.carries_scales()) return combine_bwd_copied();
  const bool dot = weighted && common_chance(12) % 2 == 0;
  const auto code = [&](Content content, int rank, std::int64_t r, std::int64_t column) {
    const Element at = element(content, rank, r, column);
    return dot ? small_integer_code(at, format) : float_code(at, format);
  };
  Tensor grad_out = token_input(case_.dtype, {tokens(), columns}, [&](auto t, auto column) {
    return code(Content::grad_out, me, t, column);
  });
  Tensor expert_out = receive_input(case_.dtype, {rows, columns}, [&](auto r, auto column) {
    return code(Content::expert_out, me, r, column);
  });
  Tensor weights = receive_input(
      kF32, {rows}, [&](auto r, auto) { return encode(weight_at(me, r), kFormatF32); },
      Grain::elements);
  Tensor grad_expert_out = output(case_.dtype, {rows, columns}, true);
  Tensor grad_weights = output(kF32, {rows}, true, Grain::elements);

  xd_ep_combine_bwd_args args = XD_EP_COMBINE_BWD_ARGS_INIT;
  set_plan(args, plan_);
  args.grad_out = grad_out.dl();
  args.weights = weighted ? weights.dl() : nullptr;
  args.expert_out = dot ? expert_out.dl() : nullptr;
  args.grad_expert_out = grad_expert_out.dl();
  args.grad_weights = dot ? grad_weights.dl() : nullptr;
  const auto grad = [&](std::int64_t r, std::int64_t column) {
    return code(Content::grad_out, row_at(r).source, row_at(r).token, column);
  };
  const CodeAt row_gradient = [&](auto r, auto column) -> std::uint64_t {
    if (!weighted) return grad(r, column);
    return encode(weight_at(me, r) * decode(grad(r, column), format), format);
  };
  const CodeAt weight_gradient = [&](auto r, auto) {
    float sum = 0;
    for (std::int64_t column = 0; column < columns; ++column) {
      sum += decode(code(Content::expert_out, me, r, column), format) *
             decode(grad(r, column), format);
    }
    return encode(sum, kFormatF32);
  };
  in_parts(args, [&] {
    expect_status(XD_EP_COMBINE_BWD, xd_ep_combine_bwd(group_, &args, rank_.stream()));
    expect_received("grad_expert_out", grad_expert_out, row_gradient);
    if (dot) expect_received("grad_weights", grad_weights, weight_gradient);
  });
}

// Rows of 8-bit elements with scales, which dispatch carries in this case, as gradients.
void Step::combine_bwd_copied() {
  const Payload p = payload();
  const int me = rank_.rank;
  const std::int64_t rows = receive_rows(11);
  const auto tokens_of = [&](Content content) {
    return [this, content, me](auto t, auto column) {
      return any_code(element(content, me, t, column));
    };
  };
  const auto rows_of = [&](Content content) {
    return [this, content](auto r, auto column) {
      return any_code(element(content, row_at(r).source, row_at(r).token, column));
    };
  };
  Tensor grad_out = token_input(p.type, {tokens(), p.columns}, tokens_of(Content::grad_out));
  Tensor scales =
      token_input(p.scale_type, {tokens(), p.scale_columns}, tokens_of(Content::grad_out_scales));
  Tensor grad_expert_out = output(p.type, {rows, p.columns}, true);
  Tensor received_scales = output(p.scale_type, {rows, p.scale_columns}, true);
  const bool with_scales = common_chance(14) % 4 != 0;

  xd_ep_combine_bwd_args args = XD_EP_COMBINE_BWD_ARGS_INIT;
  set_plan(args, plan_);
  args.grad_out = grad_out.dl();
  args.grad_out_scales = with_scales ? scales.dl() : nullptr;
  args.grad_expert_out = grad_expert_out.dl();
  args.grad_expert_out_scales = with_scales ? received_scales.dl() : nullptr;
  in_parts(args, [&] {
    expect_status(XD_EP_COMBINE_BWD, xd_ep_combine_bwd(group_, &args, rank_.stream()));
    expect_received("grad_expert_out", grad_expert_out, rows_of(Content::grad_out));
    if (!with_scales) return;
    expect_received("grad_expert_out_scales", received_scales, rows_of(Content::grad_out_scales));
  });
}

}  // namespace xd::test
