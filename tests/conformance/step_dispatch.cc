// Step: dispatch and dispatch_bwd.
#include <gtest/gtest.h>

#include <vector>

#include "conformance/quantised.h"
#include "conformance/step.h"
#include "support/random.h"

namespace xd::test {
namespace {

// A bf16 number as quantisation meets it: magnitudes spread over e4m3's range and below, and blocks
// that are all zero.
std::uint16_t quantisable_code(Element at) {
  const std::int64_t block = at.column / 128;
  if ((at.row + block) % 4 == 3) return at.column % 2 == 0 ? 0 : 0x8000;
  const std::uint64_t random = any_code(at);
  at.column *= 16;  // ordinary magnitudes only
  const std::uint32_t code = float_code(at, kFormatBf16);
  const std::uint32_t smaller = random % 4 == 0 ? static_cast<std::uint32_t>(random >> 32) % 20 : 0;
  return static_cast<std::uint16_t>(code - (smaller << kFormatBf16.mantissa_bits));
}

// The result for the block that begins at `at`.
QuantisedBlock block_at(const QuantisedWay& way, Element at) {
  std::vector<std::uint16_t> codes;
  const std::int64_t end = at.column + way.block;
  for (; at.column < end; ++at.column) codes.push_back(quantisable_code(at));
  return quantised_block(way, codes);
}

}  // namespace

Step::Payload Step::payload() const {
  Payload p{case_.dtype, case_.dtype, kF32, 0, 0, XD_EP_QUANTISE_NONE, false};
  const std::int64_t row_bytes = std::int64_t{16} * row_units_;
  switch (case_.cargo) {
    case Cargo::payload:
      break;
    case Cargo::e4m3_with_floats:
      p.type = p.recv_type = kE4m3;
      p.scale_columns =
          1 + static_cast<std::int64_t>(common_chance(3) % static_cast<std::uint64_t>(row_units_));
      p.scaled = true;
      break;
    case Cargo::e5m2_with_e8m0:
      p.type = p.recv_type = kE5m2;
      p.scale_type = kE8m0;
      p.scale_columns = 1 + static_cast<std::int64_t>(common_chance(3) % 4) * row_units_;
      p.scaled = true;
      break;
    case Cargo::fp4: {
      const bool of_16 = common_chance(3) % 2 == 0;
      p.type = p.recv_type = kE2m1x2;
      p.scale_type = of_16 ? kE4m3 : kE8m0;
      p.scale_columns = std::int64_t{of_16 ? 2 : 1} * row_units_;
      p.scaled = true;
      break;
    }
    case Cargo::quantised:
    case Cargo::mxfp8: {
      const QuantisedWay way =
          quantised_way(case_.cargo == Cargo::mxfp8 ? XD_EP_QUANTISE_MXFP8
                                                    : kWaysToQuantise[common_chance(13) % 3]);
      const bool plain_bytes = way.scale_type.bits == 8 && common_chance(15) % 2 == 0;
      p.type = kBf16;
      p.recv_type = kE4m3;
      p.scale_type = plain_bytes ? kU8 : way.scale_type;
      p.scale_columns = row_bytes / 2 / way.block;
      p.columns = p.scale_columns * way.block;
      p.quantise = way.way;
      return p;
    }
  }
  p.columns = row_bytes / static_cast<std::int64_t>(element_bytes(p.type));
  return p;
}

void Step::dispatch() {
  const Payload p = payload();
  const int me = rank_.rank;
  const std::int64_t rows = receive_rows(4);
  const bool quantised = p.quantise != XD_EP_QUANTISE_NONE;
  Tensor tokens_in = token_input(p.type, {tokens(), p.columns}, [&](auto t, auto column) {
    const Element at = element(Content::tokens, me, t, column);
    return quantised ? quantisable_code(at) : any_code(at);
  });
  Tensor scales = token_input(
      p.scale_type, {tokens(), p.scale_columns},
      [&](auto t, auto column) { return any_code(element(Content::scales, me, t, column)); },
      Grain::scales);
  Tensor weights = token_input(
      kF32, {tokens(), topk_},
      [&](auto t, auto k) {
        return encode(weight({me, static_cast<int>(t), -1}, static_cast<int>(k)), kFormatF32);
      },
      Grain::elements);
  Tensor recv_tokens = output(p.recv_type, {rows, p.columns}, true);
  Tensor recv_scales = output(p.scale_type, {rows, p.scale_columns}, true, Grain::scales);
  Tensor recv_weights = output(kF32, choice_shape(rows), true, Grain::elements);
  // The width of the indices is each rank's own choice.
  const DLDataType idx_type = own_chance(5) % 2 == 0 ? kI32 : kI64;
  Tensor recv_idx = output(idx_type, {rows, topk_}, true, Grain::elements);
  const bool with_idx = case_.layout == XD_EP_RANK_MAJOR && common_chance(6) % 4 != 0;

  xd_ep_dispatch_args args = XD_EP_DISPATCH_ARGS_INIT;
  set_plan(args, plan_);
  args.tokens = tokens_in.dl();
  args.scales = p.scaled ? scales.dl() : nullptr;
  args.topk_weights = case_.weights ? weights.dl() : nullptr;
  args.recv_tokens = recv_tokens.dl();
  args.recv_scales = p.scaled || quantised ? recv_scales.dl() : nullptr;
  args.recv_weights = case_.weights ? recv_weights.dl() : nullptr;
  args.recv_topk_idx = with_idx ? recv_idx.dl() : nullptr;
  args.quantise = p.quantise;
  in_parts(args, [&] {
    expect_status(XD_EP_DISPATCH, xd_ep_dispatch(group_, &args, rank_.stream()));
    expect_dispatched(p, recv_tokens, recv_scales);
    if (case_.weights && case_.layout == XD_EP_EXPERT_MAJOR) {
      expect_received("recv_weights", recv_weights, [&](auto r, auto) {
        return encode(weight(row_at(r), row_at(r).k), kFormatF32);
      });
    }
  });
  if (case_.weights && case_.layout == XD_EP_RANK_MAJOR) {
    expect_choices("recv_weights", recv_weights, ChoiceField::weight);
  }
  if (with_idx) expect_choices("recv_topk_idx", recv_idx, ChoiceField::local_expert);
}

void Step::expect_dispatched(const Payload& p, const Tensor& rows, const Tensor& scales) const {
  const auto source = [&](Content content, std::int64_t r, std::int64_t column) {
    return element(content, row_at(r).source, row_at(r).token, column);
  };
  if (p.quantise != XD_EP_QUANTISE_NONE) {
    const QuantisedWay way = quantised_way(p.quantise);
    QuantisedBlock block;  // block of the current row
    expect_received("recv_tokens", rows, [&](auto r, auto column) {
      if (column % way.block == 0) block = block_at(way, source(Content::tokens, r, column));
      return block.elements[static_cast<std::size_t>(column % way.block)];
    });
    expect_received("recv_scales", scales, [&](auto r, auto s) {
      return block_at(way, source(Content::tokens, r, s * way.block)).scale;
    });
    return;
  }
  expect_received("recv_tokens", rows, [&](auto r, auto column) {
    return any_code(source(Content::tokens, r, column));
  });
  if (p.scaled) {
    expect_received("recv_scales", scales, [&](auto r, auto column) {
      return any_code(source(Content::scales, r, column));
    });
  }
}

void Step::dispatch_bwd() {
  const Format format = format_of(case_.dtype);
  const int me = rank_.rank;
  const std::int64_t rows = receive_rows(7);
  const std::int64_t columns = 16 * row_units_ / format.bytes;
  const auto grad = [&](int rank, std::int64_t r, std::int64_t column) {
    return float_code(element(Content::grad_recv_tokens, rank, r, column), format);
  };
  const auto weight_grad = [&](int rank, std::int64_t r, std::int64_t k) {
    return any_code(element(Content::grad_recv_weights, rank, r, k));
  };
  const CodeAt token_code = [&](auto r, auto column) { return grad(me, r, column); };
  const CodeAt weight_code = [&](auto r, auto k) { return weight_grad(me, r, k); };
  Tensor grad_recv_tokens = receive_input(case_.dtype, {rows, columns}, token_code);
  Tensor grad_recv_weights = receive_input(kF32, choice_shape(rows), weight_code, Grain::elements);
  Tensor grad_tokens = output(case_.dtype, {tokens(), columns}, false);
  Tensor grad_topk_weights = output(kF32, {tokens(), topk_}, false, Grain::elements);
  const bool with_tokens = common_chance(8) % 4 != 0;
  const bool with_weights = !with_tokens || common_chance(9) % 2 == 0;

  xd_ep_dispatch_bwd_args args = XD_EP_DISPATCH_BWD_ARGS_INIT;
  set_plan(args, plan_);
  args.grad_recv_tokens = with_tokens ? grad_recv_tokens.dl() : nullptr;
  args.grad_tokens = with_tokens ? grad_tokens.dl() : nullptr;
  args.grad_recv_weights = with_weights ? grad_recv_weights.dl() : nullptr;
  args.grad_topk_weights = with_weights ? grad_topk_weights.dl() : nullptr;
  const ElementAt value = [&](int rank, std::int64_t r, std::int64_t column) {
    return decode(grad(rank, r, column), format);
  };
  const HostRanks hosts = ranks_by_host(rank_.hosts, case_.num_ranks);
  const CodeAt token_sum = [&](auto t, auto column) {
    return combined(routed_, hosts, {me, static_cast<int>(t)}, column, format, value, nullptr);
  };
  const CodeAt weight_of_choice = [&](auto t, auto k) -> std::uint64_t {
    const int token = static_cast<int>(t);
    const std::optional<std::int64_t> row = routed_.row_of(me, token, static_cast<int>(k));
    if (!row) return 0;
    const int owner = routed_.owner(routed_.choices(me).id(token, static_cast<int>(k)));
    return weight_grad(owner, *row, case_.layout == XD_EP_RANK_MAJOR ? k : 0);
  };
  in_parts(args, [&] {
    if (part_ != 0) {
      write_received(grad_recv_tokens, token_code);
      write_received(grad_recv_weights, weight_code);
    }
    expect_status(XD_EP_DISPATCH_BWD, xd_ep_dispatch_bwd(group_, &args, rank_.stream()));
    if (with_tokens) expect_tokens("grad_tokens", grad_tokens, token_sum);
    if (with_weights) expect_tokens("grad_topk_weights", grad_topk_weights, weight_of_choice);
  });
}

}  // namespace xd::test
