#include "conformance/fixed_step.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <ostream>

#include "conformance/case.h"
#include "conformance/numeric.h"
#include "support/random.h"

namespace xd::test {
namespace {

constexpr int kTopk = 4;
constexpr int kLocalExperts = 4;
constexpr int kAlignment = 4;

constexpr Pattern kPatterns[] = {Pattern::uniform, Pattern::one_hot,     Pattern::holes,
                                 Pattern::zipf,    Pattern::empty_ranks, Pattern::nobody,
                                 Pattern::one_rank};

std::int64_t capacity_of(const xd_ep_config& config) {
  std::int64_t rows = config.recv_capacity;
  if (rows == 0) ok(xd_ep_recv_bound(&config, &rows));
  return rows;
}

}  // namespace

xd_ep_config FixedShape::config(int num_ranks) const {
  xd_ep_config config = XD_EP_CONFIG_INIT;
  config.num_ranks = num_ranks;
  config.num_experts = num_ranks * kLocalExperts;
  config.max_topk = kTopk;
  config.max_tokens_per_rank = tokens;
  config.hidden = hidden();
  config.wire_formats = XD_EP_WIRE_BIT(wire);
  config.dtype = dtype;
  config.layout = layout;
  config.alignment = kAlignment;
  config.recv_capacity = recv_capacity;
  config.num_sms = num_sms;
  config.staging = staging;
  config.num_logical_experts = test::logical_experts(tables, config.num_experts);
  return config;
}

void PrintTo(const FixedShape& shape, std::ostream* out) {
  *out << (shape.layout == XD_EP_EXPERT_MAJOR ? "expert-major" : "rank-major") << " float"
       << int{shape.dtype.bits} << (shape.place == Place::symmetric ? " symmetric" : " staged");
  if (shape.parts > 1) *out << " in " << shape.parts << " parts";
  if (shape.wire != XD_EP_WIRE_SAME) *out << " wire " << static_cast<int>(shape.wire);
}

FixedStep::FixedStep(const Rank& rank, const FixedShape& shape)
    : rank_(rank),
      shape_(shape),
      config_(shape.config(rank.num_ranks)),
      rows_(capacity_of(config_)),
      hidden_(shape.hidden()),
      plan_(make_plan(rank, config_)),
      topk_idx_(rank, kI64, {shape_.tokens, kTopk}),
      hints_(rank, kI64, {shape_.tokens}),
      tokens_(rank, shape.dtype, {shape_.tokens, hidden_}),
      topk_weights_(rank, kF32, {shape_.tokens, kTopk}),
      recv_tokens_(rank, shape.dtype, {rows_, hidden_}, shape.place),
      recv_weights_(rank, kF32,
                    expert_major() ? std::vector{rows_} : std::vector<std::int64_t>{rows_, kTopk},
                    shape.place),
      out_(rank, shape.dtype, {shape_.tokens, hidden_}),
      grad_expert_out_(rank, shape.dtype, {rows_, hidden_}, shape.place),
      grad_weights_(rank, kF32, {rows_}, shape.place),
      grad_tokens_(rank, shape.dtype, {shape_.tokens, hidden_}),
      grad_topk_weights_(rank, kF32, {shape_.tokens, kTopk}) {}

float FixedStep::token_value(int rank, int token, std::int64_t column) const {
  const std::uint64_t random =
      mix(test_seed(), static_cast<std::uint64_t>(number_), static_cast<std::uint64_t>(rank),
          static_cast<std::uint64_t>(token), static_cast<std::uint64_t>(column));
  return static_cast<float>(random % 9) - 4;
}

float FixedStep::weight_value(int rank, int token, int k) const {
  return token_value(rank, token, hidden_ + k) + 5;  // 1 to 9
}

float FixedStep::square(int rank, int token) const {
  float sum = 0;
  for (std::int64_t column = 0; column < hidden_; ++column) {
    const float value = token_value(rank, token, column);
    sum += value * value;
  }
  return sum;
}

void FixedStep::write(Tensor& tensor, const Values& values) const {
  const Format format = format_of(tensor.type());
  std::vector<std::byte> bytes(values.size() * static_cast<std::size_t>(format.bytes));
  for (std::size_t i = 0; i < values.size(); ++i) {
    const std::uint32_t code = encode(values[i], format);
    std::memcpy(bytes.data() + i * static_cast<std::size_t>(format.bytes), &code,
                static_cast<std::size_t>(format.bytes));
  }
  tensor.write(bytes);
}

void FixedStep::load(int number, bool spoiled) {
  number_ = number;
  const bool placed = shape_.tables != Tables::none;
  const auto num_ids = static_cast<int>(placed ? config_.num_logical_experts : config_.num_experts);
  const RoutingShape shape{rank_.num_ranks,
                           num_ids,
                           kTopk,
                           shape_.tokens,
                           kPatterns[static_cast<std::size_t>(number) % std::size(kPatterns)],
                           Tokens::full};
  std::vector<Choices> choices =
      make_routing(shape, mix(test_seed(), 0xF1, static_cast<std::uint64_t>(number)));
  if (spoiled) {
    std::vector<std::int64_t>& ids = choices.back().ids;
    ids[0] = num_ids;
    ids[ids.size() - 1] = -7;
  }
  topk_idx_.write(choices[static_cast<std::size_t>(rank_.rank)].ids);
  if (placed) {
    std::vector<std::int32_t> owners;
    for (int slot = 0; slot < config_.num_experts; ++slot) owners.push_back(slot / kLocalExperts);
    const Table now = table();
    std::vector<std::int64_t> hints;
    for (int t = 0; t < shape_.tokens; ++t) hints.push_back(now.turn_of(rank_.rank, t));
    hints_.write(hints);
    choices = now.in_slots(choices, owners, false);
  }
  routed_.emplace(Placement{rank_.num_ranks, kLocalExperts, shape_.layout, kAlignment,
                            std::vector(static_cast<std::size_t>(rank_.num_ranks), rows_),
                            XD_EP_OVERFLOW_ERROR},
                  std::move(choices));
  Values tokens, weights;
  for (int token = 0; token < shape_.tokens; ++token) {
    for (std::int64_t column = 0; column < hidden_; ++column) {
      tokens.push_back(token_value(rank_.rank, token, column));
    }
    for (int k = 0; k < kTopk; ++k) weights.push_back(weight_value(rank_.rank, token, k));
  }
  write(tokens_, tokens);
  write(topk_weights_, weights);
  for (Tensor* output : {&recv_tokens_, &recv_weights_, &out_, &grad_expert_out_, &grad_weights_,
                         &grad_tokens_, &grad_topk_weights_}) {
    output->buffer().fill(kPoison);
  }
}

Table FixedStep::table() const {
  return make_table(shape_.tables, rank_.num_ranks, config_.num_experts,
                    mix(test_seed(), 0xF2, static_cast<std::uint64_t>(number_)));
}

void FixedStep::set_table(xd_ep_group* group) const {
  const Given given(table());
  ok(finish(rank_, group, xd_ep_group_set_placement(group, given.get(), rank_.stream())));
}

xd_status FixedStep::enqueue(xd_ep_group* group, xd_ep_operation operation, int part) {
  const auto with_plan = [&](auto args) {
    set_plan(args, plan_);
    args.part = part;
    return args;
  };
  if (operation == XD_EP_PREPARE) {
    xd_ep_prepare_args args = XD_EP_PREPARE_ARGS_INIT;
    args.topk_idx = topk_idx_.dl();
    if (shape_.tables != Tables::none) args.replica_hint = hints_.dl();
    args.parts = shape_.parts;
    set_plan(args, plan_);
    return xd_ep_prepare(group, &args, rank_.stream());
  }
  if (operation == XD_EP_DISPATCH) {
    auto args = with_plan(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
    args.tokens = tokens_.dl();
    args.topk_weights = topk_weights_.dl();
    args.recv_tokens = recv_tokens_.dl();
    args.recv_weights = recv_weights_.dl();
    return xd_ep_dispatch(group, &args, rank_.stream());
  }
  if (operation == XD_EP_COMBINE) {
    auto args = with_plan(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
    args.expert_out = recv_tokens_.dl();
    args.weights = expert_major() ? recv_weights_.dl() : nullptr;
    args.out = out_.dl();
    args.wire = shape_.wire;
    return xd_ep_combine(group, &args, rank_.stream());
  }
  if (operation == XD_EP_COMBINE_BWD) {
    auto args = with_plan(xd_ep_combine_bwd_args XD_EP_COMBINE_BWD_ARGS_INIT);
    args.grad_out = tokens_.dl();
    args.grad_expert_out = grad_expert_out_.dl();
    if (expert_major()) {
      args.expert_out = recv_tokens_.dl();
      args.weights = recv_weights_.dl();
      args.grad_weights = grad_weights_.dl();
    }
    return xd_ep_combine_bwd(group, &args, rank_.stream());
  }
  auto args = with_plan(xd_ep_dispatch_bwd_args XD_EP_DISPATCH_BWD_ARGS_INIT);
  args.grad_recv_tokens = grad_expert_out_.dl();
  args.grad_recv_weights = expert_major() ? grad_weights_.dl() : recv_weights_.dl();
  args.grad_tokens = grad_tokens_.dl();
  args.grad_topk_weights = grad_topk_weights_.dl();
  return xd_ep_dispatch_bwd(group, &args, rank_.stream());
}

void FixedStep::enqueue_all(xd_ep_group* group) {
  for (const xd_ep_operation operation : kStepOperations) {
    const int last = operation == XD_EP_PREPARE || shape_.parts == 1 ? 0 : shape_.parts;
    for (int part = std::min(1, last); part <= last; ++part) ok(enqueue(group, operation, part));
  }
}

std::vector<Tensor*> FixedStep::receive_tensors() {
  return {&recv_tokens_, &recv_weights_, &grad_expert_out_, &grad_weights_};
}

xd_status FixedStep::expected() const {
  if (routed_->refused()) return XD_ERROR_OVERFLOW;
  return routed_->bad_ids() > 0 ? XD_ERROR_INVALID_ARGUMENT : XD_SUCCESS;
}

void FixedStep::expect(const char* name, const Tensor& tensor, const Values& values) const {
  EXPECT_TRUE(tensor.buffer().guards_intact()) << name << ": bytes beside it were written";
  const Format format = format_of(tensor.type());
  const auto element = static_cast<std::size_t>(format.bytes);
  const std::vector<std::byte> bytes = tensor.read();
  std::uint32_t poison = 0;
  std::memset(&poison, std::to_integer<int>(kPoison), element);
  for (std::size_t i = 0; i < bytes.size() / element; ++i) {
    std::uint32_t got = 0;
    std::memcpy(&got, bytes.data() + i * element, element);
    const bool written = i < values.size() && !routed_->refused();
    // Sums of nothing may be zeros of either sign; a product that rounds is none of ours.
    if (written ? decode(got, format) == values[i] : got == poison) continue;
    ADD_FAILURE() << name << ", batch " << number_ << ", element " << i << ": got "
                  << decode(got, format) << (written ? ", expected " : ", expected no change")
                  << (written ? std::to_string(values[i]) : "");
    return;
  }
}

float FixedStep::row_value(const Row& row, std::int64_t column, bool weighted) const {
  if (row.padding()) return 0;
  const float value = token_value(row.source, row.token, column);
  return weighted ? value * weight_value(row.source, row.token, row.k) : value;
}

void FixedStep::check_received() const {
  Values tokens, weights, grads, grad_weights;
  for (const Row& row : routed_->received(rank_.rank).rows) {
    for (std::int64_t column = 0; column < hidden_; ++column) {
      tokens.push_back(row_value(row, column, false));
      grads.push_back(row_value(row, column, expert_major()));
    }
    if (expert_major()) {
      weights.push_back(row.padding() ? 0 : weight_value(row.source, row.token, row.k));
      grad_weights.push_back(row.padding() ? 0 : square(row.source, row.token));
      continue;
    }
    for (int k = 0; k < kTopk && !row.padding(); ++k) {
      const std::int64_t id = routed_->choices(row.source).id(row.token, k);
      const bool here = id >= 0 && routed_->owner(id) == rank_.rank;
      weights.push_back(here ? weight_value(row.source, row.token, k) : 0);
    }
  }
  expect("recv_tokens", recv_tokens_, tokens);
  expect("grad_expert_out", grad_expert_out_, grads);
  expect("grad_weights", grad_weights_, grad_weights);
  if (!expert_major()) weights.resize(static_cast<std::size_t>(rows_ * kTopk), 0);
  expect("recv_weights", recv_weights_, weights);
}

int FixedStep::copies(int token) const {
  std::vector<bool> on_rank(static_cast<std::size_t>(rank_.num_ranks));
  int sum = 0;
  for (int k = 0; k < kTopk; ++k) {
    const std::int64_t id = mine().id(token, k);
    if (id < 0) continue;
    if (expert_major()) {
      sum += static_cast<int>(weight_value(rank_.rank, token, k));
    } else {
      auto&& seen = on_rank[static_cast<std::size_t>(routed_->owner(id))];
      sum += seen ? 0 : 1;
      seen = true;
    }
  }
  return sum;
}

void FixedStep::check_tokens() const {
  Values sums, grads;
  for (int token = 0; token < shape_.tokens; ++token) {
    const auto times = static_cast<float>(copies(token));
    for (std::int64_t column = 0; column < hidden_; ++column) {
      sums.push_back(times * token_value(rank_.rank, token, column));
    }
    for (int k = 0; k < kTopk; ++k) {
      const float chosen =
          expert_major() ? square(rank_.rank, token) : weight_value(rank_.rank, token, k);
      grads.push_back(mine().id(token, k) < 0 ? 0 : chosen);
    }
  }
  expect("out", out_, sums);
  expect("grad_tokens", grad_tokens_, sums);
  expect("grad_topk_weights", grad_topk_weights_, grads);
}

void FixedStep::check() const {
  check_received();
  check_tokens();
  EXPECT_TRUE(plan_.guards_intact()) << "bytes beside the plan were written";
}

}  // namespace xd::test
