#include "worker.h"

#include <algorithm>
#include <chrono>

namespace demo {
namespace {

constexpr std::uint64_t kRouterSeed = 3, kExpertSeed = 100;
constexpr float kLearningRate = 0.5f;

double now() {
  const auto since_start = std::chrono::steady_clock::now().time_since_epoch();
  return std::chrono::duration<double>(since_start).count();
}

std::size_t product(int a, int b) {
  return static_cast<std::size_t>(a) * static_cast<std::size_t>(b);
}

}  // namespace

std::size_t Worker::heap_bytes(const Sizes& s, int steps) {
  const auto local = static_cast<std::size_t>(s.local_experts());
  const std::size_t weights = 4 * local * s.expert_weights() + 2 * s.router_weights();
  // Four arrays like the output; four of as many rows as all tokens might send here.
  const std::size_t rows = product(4 + 4 * s.ranks * std::min(s.topk, s.local_experts()), s.tokens);
  const std::size_t floats = weights + rows * static_cast<std::size_t>(s.hidden);
  const std::size_t doubles = product(steps, 1) * (kPhases.size() + 1);
  return floats * sizeof(float) + doubles * sizeof(double) + (std::size_t{1} << 20);
}

Worker::Worker(Exchange& exchange, const Text& text, int steps)
    : sizes(exchange.sizes()),
      w1(exchange.comm(), product(sizes.local_experts(), 1) * sizes.expert_weights()),
      w2(exchange.comm(), w1.mine().size()),
      grad_w1(exchange.comm(), w1.mine().size()),
      grad_w2(exchange.comm(), w1.mine().size()),
      router(exchange.comm(), sizes.router_weights()),
      grad_router(exchange.comm(), sizes.router_weights()),
      out(exchange.comm(), product(sizes.tokens, sizes.hidden)),
      grad_tokens(exchange.comm(), out.mine().size()),
      counts(exchange.comm(), product(sizes.local_experts(), 1)),
      loss(exchange.comm(), product(steps, 1)),
      seconds(exchange.comm(), kPhases.size() * product(steps, 1)),
      exchange_(exchange),
      text_(text),
      experts_(sizes, exchange.recv_rows()),
      tokens_(exchange.comm(), out.mine().size()),
      recv_(exchange.comm(), exchange.recv_rows() * product(sizes.hidden, 1)),
      expert_out_(exchange.comm(), recv_.mine().size()),
      grad_expert_out_(exchange.comm(), recv_.mine().size()),
      grad_recv_(exchange.comm(), recv_.mine().size()),
      grad_out_(exchange.comm(), out.mine().size()),
      targets_(out.mine().size()),
      weights_(product(sizes.tokens, sizes.topk)),
      grad_weights_(weights_.size()),
      recv_weights_(exchange.recv_rows()),
      grad_recv_weights_(exchange.recv_rows()),
      ids_(weights_.size()),
      offsets_(product(sizes.local_experts(), 1) + 1) {
  fill_seeded(router.mine(), kRouterSeed, 1.0f / std::sqrt(static_cast<float>(sizes.hidden)));
  for (std::size_t e = 0; e < counts.mine().size(); ++e) {
    const std::uint64_t seed =
        kExpertSeed + 2 * (product(exchange.rank(), sizes.local_experts()) + e);
    const std::size_t n = sizes.expert_weights();
    fill_seeded(w1.mine().subspan(e * n, n), seed,
                std::sqrt(3.0f / static_cast<float>(sizes.hidden)));
    fill_seeded(w2.mine().subspan(e * n, n), seed + 1,
                std::sqrt(3.0f / static_cast<float>(sizes.inner)));
  }
}

void Worker::lap(std::size_t phase) {
  const double time = now();
  seconds.mine()[static_cast<std::size_t>(step_) * kPhases.size() + phase] = time - lap_start_;
  lap_start_ = time;
}

void Worker::run(int step) {
  step_ = step;
  const std::size_t first = product(step * sizes.ranks + exchange_.rank(), sizes.tokens);
  embed(text_, first, {tokens_.mine(), targets_, sizes.hidden});
  exchange_.barrier();  // the phases' times start together
  lap_start_ = now();
  forward();
  double sum = 0;
  for (std::size_t i = 0; i < targets_.size(); ++i) {
    const float difference = out.mine()[i] - targets_[i];
    sum += static_cast<double>(difference) * difference;
    grad_out_.mine()[i] = difference / static_cast<float>(sizes.all_tokens());
  }
  loss.mine()[static_cast<std::size_t>(step)] = sum / (2.0 * sizes.all_tokens());
  lap_start_ = now();
  backward();
}

void Worker::forward() {
  route(sizes, tokens_.mine(), router.mine(), {ids_, weights_});
  lap(0);
  exchange_.prepare(ids_, counts.mine(), offsets_);
  lap(1);
  exchange_.dispatch(tokens_.mine(), weights_, recv_.mine(), recv_weights_);
  lap(2);
  experts_.forward({w1.mine(), w2.mine()}, offsets_, recv_.mine(), expert_out_.mine());
  lap(3);
  exchange_.combine(expert_out_.mine(), recv_weights_, out.mine());
  lap(4);
}

void Worker::backward() {
  exchange_.combine_backward(expert_out_.mine(), recv_weights_,
                             {grad_out_.mine(), grad_expert_out_.mine(), grad_recv_weights_});
  lap(5);
  experts_.backward({w1.mine(), w2.mine()}, offsets_, recv_.mine(),
                    {grad_expert_out_.mine(), grad_recv_.mine(), {grad_w1.mine(), grad_w2.mine()}});
  lap(6);
  exchange_.dispatch_backward(
      {grad_recv_.mine(), grad_recv_weights_, grad_tokens.mine(), grad_weights_});
  lap(7);
  route_backward(sizes, tokens_.mine(), router.mine(), {ids_, weights_},
                 {grad_weights_, grad_router.mine(), grad_tokens.mine()});
  lap(8);
}

void Worker::update(int step) {
  step_ = step;
  exchange_.barrier();  // all ranks' gradients are there
  lap_start_ = now();
  std::vector<float> sum(grad_router.mine().size());
  for (int rank = 0; rank < sizes.ranks; ++rank) {
    const std::span<const float> theirs = grad_router.of(rank);
    std::transform(sum.begin(), sum.end(), theirs.begin(), sum.begin(), std::plus<float>());
  }
  const auto descend = [](std::span<float> weights, std::span<const float> gradient) {
    for (std::size_t i = 0; i < weights.size(); ++i) weights[i] -= kLearningRate * gradient[i];
  };
  descend(router.mine(), sum);
  descend(w1.mine(), grad_w1.mine());
  descend(w2.mine(), grad_w2.mine());
  exchange_.barrier();  // nobody reads this step's gradients any more
  lap(9);
}

}  // namespace demo
