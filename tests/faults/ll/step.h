// One rank of a low-latency group: its operations, good steps that are looked at in full, and how
// groups that mask lost ranks come back.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "conformance/slots/echo.h"

namespace xd::test {

// Which of so many ranks are lost, where none is.
inline std::vector<bool> nobody(int num_ranks) {
  return std::vector<bool>(static_cast<std::size_t>(num_ranks));
}

class LlSeat {
 public:
  const Rank rank;
  const LlCase c;
  const LlGroup group;

  // Makes the group. Collective.
  LlSeat(const Rank& of_rank, const LlCase& of_case, const EchoGroup& how = {})
      : rank(of_rank), c(of_case), group(make_group(rank, c, how)) {}

  Echo batch(int number) const { return Echo(rank, c, number); }
  // These return when the operation has ended, and say how.
  LlOutcome end_of(xd_status called) const { return finish(rank, group.get(), called); }
  LlOutcome call(Echo& batch, xd_ll_operation operation,
                 xd_ll_phase phase = XD_LL_PHASE_BOTH) const {
    return end_of(batch.call(group.get(), operation, phase));
  }
  LlOutcome dispatch(Echo& batch, xd_ll_phase phase = XD_LL_PHASE_BOTH) const {
    return call(batch, XD_LL_DISPATCH, phase);
  }
  LlOutcome combine(Echo& batch, xd_ll_phase phase = XD_LL_PHASE_BOTH) const {
    return call(batch, XD_LL_COMBINE, phase);
  }
  LlOutcome reset() const { return end_of(xd_ll_reset(group.get(), rank.stream())); }
  void mask(int other, bool masked) const {
    ok(xd_ll_mask_set(group.get(), other, masked ? 1 : 0, rank.stream()));
  }

  // dispatch and combine of batches, which give what the ranks that are not `lost` sent.
  void good_steps(const std::vector<bool>& lost, int first, int count) const {
    for (int number = first; number < first + count; ++number) {
      Echo batch(rank, c, number);
      ok(dispatch(batch));
      ASSERT_EQ(batch.rows_by_source(), batch.expected_rows(lost)) << "batch " << number;
      ok(combine(batch));
      ASSERT_EQ(batch.wrong(lost), "");
    }
  }
  // Brings all ranks in step again, whatever has happened to those that are `lost` to this one.
  void unmask(const std::vector<bool>& lost) const {
    for (int other = 0; other < rank.num_ranks; ++other) {
      if (lost[static_cast<std::size_t>(other)]) mask(other, false);
    }
    rank.memory->synchronize();
    ok(xd_comm_barrier(rank.comm));
    ok(reset());
  }
  void come_back() const {
    std::vector<bool> others(static_cast<std::size_t>(rank.num_ranks), true);
    others[static_cast<std::size_t>(rank.rank)] = false;
    unmask(others);
    good_steps(nobody(rank.num_ranks), 5000, 20);
  }
};

}  // namespace xd::test
