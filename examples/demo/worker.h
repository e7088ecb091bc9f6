// One rank's part of training the layer: forward, backward, update.
#pragma once

#include <array>

#include "exchange.h"
#include "experts.h"
#include "router.h"
#include "text.h"

namespace demo {

inline constexpr std::array kPhases{"router",     "prepare",     "dispatch",    "experts",
                                    "combine",    "combine bwd", "experts bwd", "dispatch bwd",
                                    "router bwd", "update"};

class Worker {
 public:
  Worker(Exchange& exchange, const Text& text, int steps);

  // Runs the batch of this step and leaves results and gradients in the arrays below.
  void run(int step);
  // One step of gradient descent. Collective: the router's gradient is summed over the ranks.
  void update(int step);

  // Symmetric memory that it will allocate, and a little more.
  static std::size_t heap_bytes(const Sizes& sizes, int steps);

  Sizes sizes;
  Shared<float> w1, w2, grad_w1, grad_w2;  // [L,H,F] and [L,F,H]: this rank's experts
  Shared<float> router, grad_router;       // [H,E]; every rank has the same, and its own gradient
  Shared<float> out, grad_tokens;          // [T,H]
  Shared<std::int32_t> counts;             // [L]: rows of each local expert
  Shared<double> loss;                     // [steps]: this rank's part
  Shared<double> seconds;                  // [steps, phases]

 private:
  void forward();
  void backward();
  void lap(std::size_t phase);

  Exchange& exchange_;
  const Text& text_;
  Experts experts_;
  // Symmetric, so that rows go straight to where they are used.
  Shared<float> tokens_, recv_, expert_out_, grad_expert_out_, grad_recv_, grad_out_;
  std::vector<float> targets_, weights_, grad_weights_;  // [T,H], [T,K], [T,K]
  std::vector<float> recv_weights_, grad_recv_weights_;  // [R]
  std::vector<std::int32_t> ids_, offsets_;              // [T,K], [L+1]
  double lap_start_ = 0;
  int step_ = 0;
};

}  // namespace demo
