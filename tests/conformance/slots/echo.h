// Low-latency steps whose experts give back what they get, in whole numbers: what a token's sum
// must be does not depend on slots, so it is known also where ranks are lost on the way.
#pragma once

#include <crossdock/low_latency.h>

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "conformance/slots/case.h"
#include "conformance/strided.h"
#include "support/outcome.h"

namespace xd::test {

// The case of these steps: float32, two experts per rank, no weights.
LlCase echo_case(int num_ranks);

struct EchoGroup {
  xd_ll_peer_loss on_peer_loss = XD_LL_PEER_LOSS_FATAL;
  std::int32_t wait_timeout_ms = 0;
};
LlGroup make_group(const Rank& rank, const LlCase& c, const EchoGroup& how);

// One batch. Each call's status is the caller's to judge.
class Echo {
 public:
  Echo(const Rank& rank, const LlCase& c, int number);
  // Makes it another batch, in place; of cases in which all batches have as many tokens.
  void load(int number);
  xd_status dispatch(xd_ll_group* group, xd_ll_phase phase = XD_LL_PHASE_BOTH);
  xd_status combine(xd_ll_group* group, xd_ll_phase phase = XD_LL_PHASE_BOTH);
  xd_status call(xd_ll_group* group, xd_ll_operation operation,
                 xd_ll_phase phase = XD_LL_PHASE_BOTH);
  int tokens() const { return choices_.tokens; }
  // Gives weights to combine, all of them 1. All ranks call it.
  void weigh_in_combine() { weigh_in_combine(weights_.dl()); }
  void weigh_in_combine(const DLTensor* weights) { combine_.topk_weights = weights; }
  Buffer& plan() { return plan_; }

  // The slots [L,S,H] that dispatch writes and combine reads, and others in their place.
  const DLTensor* rows() { return rows_.dl(); }
  void use_rows(const DLTensor* rows) { dispatch_.recv_tokens = combine_.expert_out = rows; }

  // After combine: empty if every token came back as often as it was sent to ranks that are not
  // lost, else what is wrong. `unsure`: lost ranks may have had a part in it, or not.
  std::string wrong(const std::vector<bool>& lost, bool unsure = false) const;
  // After combine: wait_ns, which began with zeros.
  std::vector<std::int64_t> waits() const { return waits_.read_as<std::int64_t>(); }
  // After dispatch: the rows that it says to have come from each rank.
  std::vector<std::int64_t> rows_by_source() const;
  // The slots of a local expert with rows of a rank.
  struct Range {
    std::int64_t first, rows;
  };
  Range range(int expert, int source) const;
  // The rows that must come from each rank.
  std::vector<std::int64_t> expected_rows(const std::vector<bool>& lost) const;

 private:
  float value(int token, std::int64_t column) const;

  const Rank& rank_;
  const LlCase case_;
  int number_;
  Choices choices_;
  const std::vector<std::int32_t> owners_;
  Buffer plan_;
  Tensor topk_idx_, hints_, weights_;
  Strided tokens_, rows_;
  Tensor counts_, ranges_, out_, waits_;
  xd_ll_dispatch_args dispatch_ = XD_LL_DISPATCH_ARGS_INIT;
  xd_ll_combine_args combine_ = XD_LL_COMBINE_ARGS_INIT;
};

}  // namespace xd::test
