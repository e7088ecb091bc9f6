// One token with the same row, experts and weights in every batch, among other tokens on any rank.
// Its result must be the one that it has alone, in every bit.
#pragma once

#include <crossdock/quantise.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "support/outcome.h"
#include "support/tensor.h"

namespace xd::test {

// The operations that carry it; experts' sums are weighted, by the caller where rows go by rank.
enum class Way { expert_major, rank_major, slots, by_expert, by_rank };
inline constexpr Way kWays[] = {Way::expert_major, Way::rank_major, Way::slots, Way::by_expert,
                                Way::by_rank};

// Where the token is, equal on all ranks.
struct Among {
  int home = 0;              // its rank
  int tokens = 1;            // of that rank; other ranks have any number
  int place = 0;             // its place among them
  std::uint64_t others = 0;  // chooses all other tokens
};

// Enqueues calls, and waits until they have ended.
using Enqueue = std::function<void(const std::function<void()>&)>;

class Wanderer {
 public:
  static constexpr int kMostTokens = 1024;

  struct Settings {
    int num_sms = 0;
    xd_ep_wire wire = XD_EP_WIRE_SAME;
  };
  Wanderer(const Rank& rank, Way way, Settings settings = {0, XD_EP_WIRE_SAME});

  // Dispatch, experts and combine of one batch; fails the test on the token's rank if its result
  // has other bits. Collective.
  void travel(const Among& among, const Enqueue& enqueue);
  // The same for every rank, alone and at every kind of place among others.
  void wander(const Enqueue& enqueue);
  // The bits that it must have, by definition. `backwards`: with its choices in reverse order.
  std::vector<std::uint32_t> expected(bool backwards = false) const;

 private:
  struct Batch;

  bool bulk() const { return way_ == Way::expert_major || way_ == Way::rank_major; }
  bool per_rank() const { return way_ == Way::rank_major || way_ == Way::by_rank; }
  template <class Config>
  void fill(Config& config) const;  // with the sizes of either kind
  xd_ep_config bulk_config() const;
  xd_ll_config slot_config() const;
  std::int64_t rows_of(const xd_ll_config& config) const;
  void dispatch(Batch& batch);
  std::vector<std::int64_t> local_experts(const Batch& batch) const;
  void compute(Batch& batch) const;
  void combine(Batch& batch);

  const Rank& rank_;
  const Way way_;
  const Settings settings_;
  const int num_experts_;
  std::int64_t rows_ = 0;  // of receive tensors
  Buffer plan_;
  Group bulk_;
  LlGroup slots_;
};

}  // namespace xd::test
