#include "router.h"

#include <algorithm>
#include <numeric>

namespace demo {
namespace {

// In double: the check computes the logits once more in another order, and must choose the same.
std::vector<double> logits_of(std::span<const float> token, std::span<const float> router) {
  const std::size_t experts = router.size() / token.size();
  std::vector<double> logits(experts);
  for (std::size_t h = 0; h < token.size(); ++h) {
    for (std::size_t e = 0; e < experts; ++e) {
      logits[e] += static_cast<double>(token[h]) * static_cast<double>(router[h * experts + e]);
    }
  }
  return logits;
}

}  // namespace

void route(const Sizes& sizes, std::span<const float> tokens, std::span<const float> router,
           const Routing& routing) {
  const auto hidden = static_cast<std::size_t>(sizes.hidden);
  const auto topk = static_cast<std::size_t>(sizes.topk);
  std::vector<std::int32_t> order(static_cast<std::size_t>(sizes.experts));
  for (std::size_t t = 0; t < tokens.size() / hidden; ++t) {
    const std::vector<double> logits = logits_of(tokens.subspan(t * hidden, hidden), router);
    const auto logit = [&](std::int32_t e) { return logits[static_cast<std::size_t>(e)]; };
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + sizes.topk, order.end(),
                      [&](auto a, auto b) { return logit(a) > logit(b); });
    double total = 0;
    for (std::size_t k = 0; k < topk; ++k) total += std::exp(logit(order[k]) - logit(order[0]));
    for (std::size_t k = 0; k < topk; ++k) {
      routing.ids[t * topk + k] = order[k];
      routing.weights[t * topk + k] =
          static_cast<float>(std::exp(logit(order[k]) - logit(order[0])) / total);
    }
  }
}

void route_backward(const Sizes& sizes, std::span<const float> tokens,
                    std::span<const float> router, const Routing& routing,
                    const RouterGradients& gradients) {
  const auto hidden = static_cast<std::size_t>(sizes.hidden);
  const auto topk = static_cast<std::size_t>(sizes.topk);
  const auto experts = static_cast<std::size_t>(sizes.experts);
  std::fill(gradients.router.begin(), gradients.router.end(), 0.0f);
  for (std::size_t t = 0; t < tokens.size() / hidden; ++t) {
    const std::size_t first = t * topk;
    float mean = 0;
    for (std::size_t i = first; i < first + topk; ++i) {
      mean += routing.weights[i] * gradients.weights[i];
    }
    for (std::size_t i = first; i < first + topk; ++i) {
      const float grad_logit = routing.weights[i] * (gradients.weights[i] - mean);
      const auto e = static_cast<std::size_t>(routing.ids[i]);
      for (std::size_t h = 0; h < hidden; ++h) {
        gradients.router[h * experts + e] += grad_logit * tokens[t * hidden + h];
        gradients.tokens[t * hidden + h] += grad_logit * router[h * experts + e];
      }
    }
  }
}

}  // namespace demo
