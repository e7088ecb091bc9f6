#include "conformance/moe/layer.h"

#include <crossdock/grouped.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <bit>

#include "support/random.h"

namespace xd::test {

Case layer_case(int num_ranks, int parts) {
  Case c = plain_case(num_ranks);
  c.local_experts = std::max(5, parts);  // no multiple of 2, 3 and 4
  c.parts = parts;
  return c;
}

void turn_routing(const Rank& rank, const Case& c, Batch& batch, int by) {
  const Choices& given = batch.routed().choices(rank.rank);
  std::vector<std::int64_t> ids;
  for (int token = 0; token < given.tokens; ++token) {
    for (int k = 0; k < given.topk; ++k) {
      const std::int64_t id = given.id((token + by) % given.tokens, k);
      const std::int64_t local = id % c.local_experts;
      ids.push_back(id < 0 ? id : id - local + (local + by) % c.local_experts);
    }
  }
  batch.field(XD_EP_PREPARE, "topk_idx").tensor->write(ids);
}

namespace {

constexpr std::int64_t kFfn = 24;  // other than hidden, in whole units of 16 bytes

}  // namespace

Layer::Layer(const Rank& rank, const Case& c, Batch& batch, Options options)
    : rank_(rank),
      options_(options),
      batch_(batch),
      experts_(c.local_experts_of(rank.rank)),
      tokens_count_(batch.routed().choices(rank.rank).tokens),
      topk_(batch.routed().choices(rank.rank).topk),
      rows_(static_cast<std::int64_t>(batch.routed().received(rank.rank).rows.size())),
      hidden_(std::int64_t{16} * c.row_units / static_cast<std::int64_t>(element_bytes(c.dtype))),
      ffn_(kFfn),
      seed_(mix(c.seed, 0x1A7E8)),
      tokens_(rank, c.dtype, {tokens_count_, hidden_}),
      topk_weights_(rank, kF32, {tokens_count_, topk_}),
      w_in_(rank, c.dtype, {experts_, hidden_, 2 * ffn_}),
      w_out_(rank, c.dtype, {experts_, ffn_, hidden_}),
      grad_out_(rank, c.dtype, {tokens_count_, hidden_}),
      recv_tokens_(rank, c.dtype, {rows_, hidden_}, options.place),
      recv_weights_(rank, kF32, {rows_}, options.place),
      inner_(rank, c.dtype, {rows_, 2 * ffn_}),
      activated_(rank, c.dtype, {rows_, ffn_}),
      expert_out_(rank, c.dtype, {rows_, hidden_}, options.place),
      out_(rank, c.dtype, {tokens_count_, hidden_}),
      grad_expert_out_(rank, c.dtype, {rows_, hidden_}, options.place),
      grad_recv_weights_(rank, kF32, {rows_}, options.place),
      grad_activated_(rank, c.dtype, {rows_, ffn_}),
      grad_inner_(rank, c.dtype, {rows_, 2 * ffn_}),
      grad_recv_tokens_(rank, c.dtype, {rows_, hidden_}, options.place),
      grad_tokens_(rank, c.dtype, {tokens_count_, hidden_}),
      grad_topk_weights_(rank, kF32, {tokens_count_, topk_}),
      grad_w_in_(rank, options.grad_type, {experts_, hidden_, 2 * ffn_}),
      grad_w_out_(rank, options.grad_type, {experts_, ffn_, hidden_}) {
  std::uint64_t salt = 0;
  for (Tensor* input : {&tokens_, &topk_weights_, &w_in_, &w_out_, &grad_out_}) {
    fill(*input, ++salt);
  }
  if (options.accumulate) {
    fill(grad_w_in_, ++salt);
    fill(grad_w_out_, ++salt);
  }
  set_forward();
  set_backward();
}

// Numbers in [-1, 1) of a rank's own.
void Layer::fill(Tensor& tensor, std::uint64_t salt) {
  const std::size_t width = element_bytes(tensor.type());
  std::vector<std::byte> bytes;
  std::int64_t count = 1;
  for (const std::int64_t extent : tensor.shape()) count *= extent;
  for (std::int64_t i = 0; i < count; ++i) {
    const std::uint64_t drawn =
        mix(seed_, salt, static_cast<std::uint64_t>(rank_.rank), static_cast<std::uint64_t>(i));
    const float value = static_cast<float>(drawn >> 40) * 0x1p-23f - 1;
    const auto word = std::bit_cast<std::uint32_t>(value) >> (32 - 8 * width);
    const auto* raw = reinterpret_cast<const std::byte*>(&word);
    bytes.insert(bytes.end(), raw, raw + width);
  }
  tensor.write(bytes);
}

void Layer::set_forward() {
  xd_moe_forward_args& args = forward_args;
  args.offsets = batch_.prepare_args.offsets;
  args.tokens = tokens_.dl();
  args.w_in = experts_ > 0 ? w_in_.dl() : nullptr;
  args.w_out = experts_ > 0 ? w_out_.dl() : nullptr;
  args.recv_tokens = recv_tokens_.dl();
  args.inner = inner_.dl();
  args.activated = activated_.dl();
  args.expert_out = expert_out_.dl();
  args.out = out_.dl();
  args.activation = options_.activation;
  set_plan(args, batch_.plan());
  if (!options_.weighted) return;
  args.topk_weights = topk_weights_.dl();
  args.recv_weights = recv_weights_.dl();
}

void Layer::set_backward() {
  xd_moe_backward_args& args = backward_args;
  args.offsets = forward_args.offsets;
  args.grad_out = grad_out_.dl();
  args.w_in = forward_args.w_in;
  args.w_out = forward_args.w_out;
  args.recv_tokens = recv_tokens_.dl();
  args.inner = inner_.dl();
  args.activated = activated_.dl();
  args.grad_expert_out = grad_expert_out_.dl();
  args.grad_activated = grad_activated_.dl();
  args.grad_inner = options_.in_place ? inner_.dl() : grad_inner_.dl();
  args.grad_recv_tokens = grad_recv_tokens_.dl();
  args.grad_tokens = grad_tokens_.dl();
  if (experts_ > 0) {
    args.grad_w_in = grad_w_in_.dl();
    args.grad_w_out = grad_w_out_.dl();
  }
  args.activation = options_.activation;
  args.accumulate = options_.accumulate ? 1 : 0;
  set_plan(args, batch_.plan());
  if (!options_.weighted) return;
  args.recv_weights = recv_weights_.dl();
  args.expert_out = expert_out_.dl();
  args.grad_recv_weights = grad_recv_weights_.dl();
  args.grad_topk_weights = grad_topk_weights_.dl();
}

Outcome Layer::forward(xd_ep_group* group, int parts, int num_sms) {
  forward_args.parts = parts;
  forward_args.num_sms = num_sms;
  return finish(rank_, group, xd_moe_forward(group, &forward_args, rank_.stream()));
}

Outcome Layer::backward(xd_ep_group* group, int parts, int num_sms) {
  backward_args.parts = parts;
  backward_args.num_sms = num_sms;
  return finish(rank_, group, xd_moe_backward(group, &backward_args, rank_.stream()));
}

namespace {

// [L,K,N] as [L,N,K].
struct Transposed {
  explicit Transposed(const DLTensor& of)
      : shape{of.shape[0], of.shape[2], of.shape[1]},
        strides{of.shape[1] * of.shape[2], 1, of.shape[2]},
        tensor(of) {
    tensor.shape = shape;
    tensor.strides = strides;
  }
  Transposed(const Transposed&) = delete;
  Transposed& operator=(const Transposed&) = delete;

  std::int64_t shape[3], strides[3];
  DLTensor tensor;
};

// The first or the second half of the columns of [R,2F].
struct Half {
  Half(const DLTensor& of, int which)
      : shape{of.shape[0], of.shape[1] / 2}, strides{of.shape[1], 1}, tensor(of) {
    tensor.byte_offset += static_cast<std::uint64_t>(which * shape[1] * of.dtype.bits / 8);
    tensor.shape = shape;
    tensor.strides = strides;
  }
  Half(const Half&) = delete;
  Half& operator=(const Half&) = delete;

  std::int64_t shape[2], strides[2];
  DLTensor tensor;
};

}  // namespace

void Layer::product(const DLTensor* a, const DLTensor* b, const DLTensor* d) const {
  xd_grouped_product_args args = XD_GROUPED_PRODUCT_ARGS_INIT;
  args.a = a;
  args.b = b;
  args.d = d;
  args.offsets = forward_args.offsets;
  ok(xd_grouped_product(rank_.comm, &args, rank_.stream()));
}

void Layer::outer(const DLTensor* a, const DLTensor* b, const DLTensor* d) const {
  xd_grouped_outer_args args = XD_GROUPED_OUTER_ARGS_INIT;
  args.a = a;
  args.b = b;
  args.d = d;
  args.offsets = forward_args.offsets;
  args.accumulate = options_.accumulate ? 1 : 0;
  ok(xd_grouped_outer(rank_.comm, &args, rank_.stream()));
}

void Layer::forward_by_calls(xd_ep_group* group) const {
  const xd_moe_forward_args& a = forward_args;
  xd_ep_dispatch_args dispatch = XD_EP_DISPATCH_ARGS_INIT;
  set_plan(dispatch, batch_.plan());
  dispatch.tokens = a.tokens;
  dispatch.topk_weights = a.topk_weights;
  dispatch.recv_tokens = a.recv_tokens;
  dispatch.recv_weights = a.recv_weights;
  ok(xd_ep_dispatch(group, &dispatch, rank_.stream()));
  if (experts_ > 0) {
    const Half gate(*a.inner, 0), up(*a.inner, 1);
    product(a.recv_tokens, a.w_in, a.inner);
    xd_gated_args gated = XD_GATED_ARGS_INIT;
    gated.activation = a.activation;
    gated.gate = &gate.tensor;
    gated.up = &up.tensor;
    gated.offsets = a.offsets;
    gated.out = a.activated;
    ok(xd_gated(rank_.comm, &gated, rank_.stream()));
    product(a.activated, a.w_out, a.expert_out);
  }
  xd_ep_combine_args combine = XD_EP_COMBINE_ARGS_INIT;
  set_plan(combine, batch_.plan());
  combine.expert_out = a.expert_out;
  combine.weights = a.recv_weights;
  combine.out = a.out;
  ok(finish(rank_, group, xd_ep_combine(group, &combine, rank_.stream())));
}

void Layer::backward_by_calls(xd_ep_group* group) const {
  const xd_moe_backward_args& a = backward_args;
  xd_ep_combine_bwd_args combine = XD_EP_COMBINE_BWD_ARGS_INIT;
  set_plan(combine, batch_.plan());
  combine.grad_out = a.grad_out;
  combine.weights = a.recv_weights;
  combine.expert_out = a.expert_out;
  combine.grad_expert_out = a.grad_expert_out;
  combine.grad_weights = a.grad_recv_weights;
  ok(xd_ep_combine_bwd(group, &combine, rank_.stream()));
  if (experts_ > 0) {
    const Transposed w_in(*a.w_in), w_out(*a.w_out);
    const Half gate(*a.inner, 0), up(*a.inner, 1);
    const Half grad_gate(*a.grad_inner, 0), grad_up(*a.grad_inner, 1);
    product(a.grad_expert_out, &w_out.tensor, a.grad_activated);
    xd_gated_bwd_args gated = XD_GATED_BWD_ARGS_INIT;
    gated.activation = a.activation;
    gated.grad_out = a.grad_activated;
    gated.gate = &gate.tensor;
    gated.up = &up.tensor;
    gated.offsets = a.offsets;
    gated.grad_gate = &grad_gate.tensor;
    gated.grad_up = &grad_up.tensor;
    ok(xd_gated_bwd(rank_.comm, &gated, rank_.stream()));
    product(a.grad_inner, &w_in.tensor, a.grad_recv_tokens);
    outer(a.activated, a.grad_expert_out, a.grad_w_out);
    outer(a.recv_tokens, a.grad_inner, a.grad_w_in);
  }
  xd_ep_dispatch_bwd_args dispatch = XD_EP_DISPATCH_BWD_ARGS_INIT;
  set_plan(dispatch, batch_.plan());
  dispatch.grad_recv_tokens = a.grad_recv_tokens;
  dispatch.grad_recv_weights = a.grad_recv_weights;
  dispatch.grad_tokens = a.grad_tokens;
  dispatch.grad_topk_weights = a.grad_topk_weights;
  ok(finish(rank_, group, xd_ep_dispatch_bwd(group, &dispatch, rank_.stream())));
}

std::vector<std::pair<const char*, const Tensor*>> Layer::outputs() const {
  return {{"recv_tokens", &recv_tokens_},
          {"recv_weights", &recv_weights_},
          {"inner", &inner_},
          {"activated", &activated_},
          {"expert_out", &expert_out_},
          {"out", &out_},
          {"grad_expert_out", &grad_expert_out_},
          {"grad_recv_weights", &grad_recv_weights_},
          {"grad_activated", &grad_activated_},
          {"grad_inner", &grad_inner_},
          {"grad_recv_tokens", &grad_recv_tokens_},
          {"grad_tokens", &grad_tokens_},
          {"grad_topk_weights", &grad_topk_weights_},
          {"grad_w_in", &grad_w_in_},
          {"grad_w_out", &grad_w_out_}};
}

void Layer::expect_equal(const Layer& other) const {
  const auto mine = outputs(), theirs = other.outputs();
  for (std::size_t i = 0; i < mine.size(); ++i) {
    EXPECT_TRUE(mine[i].second->read() == theirs[i].second->read()) << mine[i].first;
    EXPECT_TRUE(mine[i].second->buffer().guards_intact()) << mine[i].first;
  }
}

bool Layer::untouched() const {
  return std::ranges::all_of(outputs(), [](const auto& one) { return one.second->untouched(); });
}

std::vector<Layer::Field> Layer::fields() {
  xd_moe_forward_args& f = forward_args;
  xd_moe_backward_args& b = backward_args;
  return {{"offsets", &f.offsets, false},
          {"tokens", &f.tokens, false},
          {"topk_weights", &f.topk_weights, false},
          {"w_in", &f.w_in, false},
          {"w_out", &f.w_out, false},
          {"recv_tokens", &f.recv_tokens, false},
          {"recv_weights", &f.recv_weights, false},
          {"inner", &f.inner, false},
          {"activated", &f.activated, false},
          {"expert_out", &f.expert_out, false},
          {"out", &f.out, false},
          {"offsets", &b.offsets, true},
          {"grad_out", &b.grad_out, true},
          {"w_in", &b.w_in, true},
          {"w_out", &b.w_out, true},
          {"recv_tokens", &b.recv_tokens, true},
          {"recv_weights", &b.recv_weights, true},
          {"inner", &b.inner, true},
          {"activated", &b.activated, true},
          {"expert_out", &b.expert_out, true},
          {"grad_expert_out", &b.grad_expert_out, true},
          {"grad_recv_weights", &b.grad_recv_weights, true},
          {"grad_activated", &b.grad_activated, true},
          {"grad_inner", &b.grad_inner, true},
          {"grad_recv_tokens", &b.grad_recv_tokens, true},
          {"grad_tokens", &b.grad_tokens, true},
          {"grad_topk_weights", &b.grad_topk_weights, true},
          {"grad_w_in", &b.grad_w_in, true},
          {"grad_w_out", &b.grad_w_out, true}};
}

}  // namespace xd::test
