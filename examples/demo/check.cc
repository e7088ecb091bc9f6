#include "check.h"

#include <algorithm>
#include <numeric>

namespace demo {
namespace {

// All weights, all tokens, and what must come out. Expert e's matrices start at e * H * F.
struct Layer {
  std::vector<float> router, w1, w2, tokens, targets;
  std::vector<float> out, grad_tokens, grad_router, grad_w1, grad_w2;
  std::vector<std::int32_t> counts;
};

// The ranks' arrays, one after another.
template <class T>
std::vector<T> gather(const Shared<T>& shared, int ranks) {
  std::vector<T> all;
  for (int rank = 0; rank < ranks; ++rank) {
    const auto part = shared.of(rank);
    all.insert(all.end(), part.begin(), part.end());
  }
  return all;
}

struct Choice {
  std::size_t expert;
  float weight;
};

// The K largest logits and the softmax over them. In double, as the router does it: which experts
// are chosen must not depend on the order of a sum.
std::vector<Choice> choose(const Sizes& sizes, const float* token,
                           const std::vector<float>& router) {
  const auto experts = static_cast<std::size_t>(sizes.experts);
  std::vector<std::pair<double, std::size_t>> logits;
  for (std::size_t e = 0; e < experts; ++e) {
    double logit = 0;
    for (std::size_t h = static_cast<std::size_t>(sizes.hidden); h-- > 0;) {
      logit += static_cast<double>(token[h]) * router[h * experts + e];
    }
    logits.emplace_back(-logit, e);
  }
  std::sort(logits.begin(), logits.end());
  logits.resize(static_cast<std::size_t>(sizes.topk));
  double total = 0;
  for (const auto& [minus_logit, e] : logits) total += std::exp(logits[0].first - minus_logit);
  std::vector<Choice> choices;
  for (const auto& [minus_logit, e] : logits) {
    choices.push_back({e, static_cast<float>(std::exp(logits[0].first - minus_logit) / total)});
  }
  return choices;
}

// One token through one expert, forward and backward.
class Visit {
 public:
  Visit(const Sizes& sizes, Layer& layer, std::size_t token, std::size_t expert)
      : hidden_(static_cast<std::size_t>(sizes.hidden)),
        inner_(static_cast<std::size_t>(sizes.inner)),
        layer_(layer),
        token_(token * hidden_),
        weights_(expert * sizes.expert_weights()),
        before_(inner_),
        after_(inner_),
        out(hidden_) {
    for (std::size_t h = 0; h < hidden_; ++h) {
      for (std::size_t f = 0; f < inner_; ++f) {
        before_[f] += layer.tokens[token_ + h] * layer.w1[weights_ + h * inner_ + f];
      }
    }
    std::transform(before_.begin(), before_.end(), after_.begin(), silu);
    for (std::size_t f = 0; f < inner_; ++f) {
      for (std::size_t h = 0; h < hidden_; ++h) {
        out[h] += after_[f] * layer.w2[weights_ + f * hidden_ + h];
      }
    }
  }

  void backward(const std::vector<float>& grad_out) {
    for (std::size_t f = 0; f < inner_; ++f) {
      float grad = 0;
      for (std::size_t h = 0; h < hidden_; ++h) {
        layer_.grad_w2[weights_ + f * hidden_ + h] += after_[f] * grad_out[h];
        grad += grad_out[h] * layer_.w2[weights_ + f * hidden_ + h];
      }
      after_[f] = grad * silu_derivative(before_[f]);  // from here on the gradient of before_
    }
    for (std::size_t h = 0; h < hidden_; ++h) {
      for (std::size_t f = 0; f < inner_; ++f) {
        layer_.grad_w1[weights_ + h * inner_ + f] += layer_.tokens[token_ + h] * after_[f];
        layer_.grad_tokens[token_ + h] += after_[f] * layer_.w1[weights_ + h * inner_ + f];
      }
    }
  }

 private:
  std::size_t hidden_, inner_;
  Layer& layer_;
  std::size_t token_, weights_;
  std::vector<float> before_, after_;

 public:
  std::vector<float> out;
};

void compute_token(const Sizes& sizes, Layer& layer, std::size_t t) {
  const auto hidden = static_cast<std::size_t>(sizes.hidden);
  const auto experts = static_cast<std::size_t>(sizes.experts);
  const float* const token = &layer.tokens[t * hidden];
  const std::vector<Choice> choices = choose(sizes, token, layer.router);
  std::vector<Visit> visits;
  for (const Choice& choice : choices) {
    visits.emplace_back(sizes, layer, t, choice.expert);
    ++layer.counts[choice.expert];
    for (std::size_t h = 0; h < hidden; ++h) {
      layer.out[t * hidden + h] += choice.weight * visits.back().out[h];
    }
  }
  std::vector<float> grad_out(hidden), grad_weight(choices.size());
  for (std::size_t h = 0; h < hidden; ++h) {
    grad_out[h] = (layer.out[t * hidden + h] - layer.targets[t * hidden + h]) /
                  static_cast<float>(sizes.all_tokens());
  }
  float mean = 0;
  for (std::size_t k = 0; k < choices.size(); ++k) {
    grad_weight[k] =
        std::inner_product(grad_out.begin(), grad_out.end(), visits[k].out.begin(), 0.0f);
    mean += choices[k].weight * grad_weight[k];
    std::vector<float> weighted(hidden);
    for (std::size_t h = 0; h < hidden; ++h) weighted[h] = choices[k].weight * grad_out[h];
    visits[k].backward(weighted);
  }
  for (std::size_t k = 0; k < choices.size(); ++k) {
    const float grad_logit = choices[k].weight * (grad_weight[k] - mean);
    for (std::size_t h = 0; h < hidden; ++h) {
      layer.grad_router[h * experts + choices[k].expert] += grad_logit * token[h];
      layer.grad_tokens[t * hidden + h] +=
          grad_logit * layer.router[h * experts + choices[k].expert];
    }
  }
}

Layer compute(const Worker& worker, const Text& text, int step) {
  const Sizes& sizes = worker.sizes;
  const auto all = static_cast<std::size_t>(sizes.all_tokens());
  const std::size_t elements = all * static_cast<std::size_t>(sizes.hidden);
  const std::vector<float> zeros(elements);
  Layer layer{.router = {worker.router.mine().begin(), worker.router.mine().end()},
              .w1 = gather(worker.w1, sizes.ranks),
              .w2 = gather(worker.w2, sizes.ranks),
              .tokens = zeros,
              .targets = zeros,
              .out = zeros,
              .grad_tokens = zeros,
              .grad_router = std::vector<float>(sizes.router_weights()),
              .grad_w1 = {},
              .grad_w2 = {},
              .counts = std::vector<std::int32_t>(static_cast<std::size_t>(sizes.experts))};
  layer.grad_w1.resize(layer.w1.size());
  layer.grad_w2.resize(layer.w2.size());
  embed(text, static_cast<std::size_t>(step) * all, {layer.tokens, layer.targets, sizes.hidden});
  for (std::size_t t = 0; t < all; ++t) compute_token(sizes, layer, t);
  return layer;
}

template <class T>
Comparison compare(const char* what, const std::vector<T>& got, const std::vector<T>& want,
                   double allowed) {
  double difference = 0, largest = 0;
  for (std::size_t i = 0; i < want.size(); ++i) {
    const double expected = static_cast<double>(want[i]);
    const double error = std::fabs(static_cast<double>(got[i]) - expected);
    if (!std::isfinite(error)) return {what, INFINITY, allowed};
    difference = std::max(difference, error);
    largest = std::max(largest, std::fabs(expected));
  }
  return {what, difference / (largest > 0 ? largest : 1), allowed};
}

}  // namespace

// How far two float32 computations may lie apart: every value comes out of a chain of at most n
// rounded operations, each of which errs by 2^-24 of its result, so both together by n * 2^-23 of
// the largest value. That errors rarely add up (they grow like the square root of n) makes up for
// sums whose terms are larger than the result.
std::vector<Comparison> check_step(const Worker& worker, const Text& text, int step) {
  const Sizes& s = worker.sizes;
  const Layer want = compute(worker, text, step);
  const int forward = s.hidden + s.inner + s.topk;
  const int backward = 2 * forward;
  const int weights = backward + s.all_tokens();
  const auto allowed = [](int operations) { return operations * 0x1p-23; };
  std::vector<float> grad_router(want.grad_router.size());
  for (int rank = 0; rank < s.ranks; ++rank) {
    const auto theirs = worker.grad_router.of(rank);
    std::transform(theirs.begin(), theirs.end(), grad_router.begin(), grad_router.begin(),
                   std::plus<float>());
  }
  return {
      compare("rows per expert", gather(worker.counts, s.ranks), want.counts, 0),
      compare("output", gather(worker.out, s.ranks), want.out, allowed(forward)),
      compare("gradient of tokens", gather(worker.grad_tokens, s.ranks), want.grad_tokens,
              allowed(backward)),
      compare("gradient of router", grad_router, want.grad_router, allowed(weights)),
      compare("gradient of W1", gather(worker.grad_w1, s.ranks), want.grad_w1, allowed(weights)),
      compare("gradient of W2", gather(worker.grad_w2, s.ranks), want.grad_w2, allowed(weights)),
  };
}

}  // namespace demo
