// The router: which experts a token goes to and with which weights, and its gradients.
#pragma once

#include <cstdint>
#include <span>

#include "layer.h"

namespace demo {

// Choices of this rank's tokens: ids and weights are [T,K].
struct Routing {
  std::span<std::int32_t> ids;
  std::span<float> weights;
};

void route(const Sizes& sizes, std::span<const float> tokens, std::span<const float> router,
           const Routing& routing);

struct RouterGradients {
  std::span<const float> weights;  // in  [T,K], what dispatch_bwd gives
  std::span<float> router;         // out [H,E]
  std::span<float> tokens;         // adds to [T,H]
};
void route_backward(const Sizes& sizes, std::span<const float> tokens,
                    std::span<const float> router, const Routing& routing,
                    const RouterGradients& gradients);

}  // namespace demo
