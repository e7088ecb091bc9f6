// Good steps of low latency, looked at in full, and how groups that mask lost ranks come back.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "conformance/ll_echo.h"

namespace xd::test {

// Which of so many ranks are lost, where none is.
inline std::vector<bool> nobody(int num_ranks) {
  return std::vector<bool>(static_cast<std::size_t>(num_ranks));
}

// dispatch and combine of batch `number`, which give what the ranks that are not `lost` sent.
inline void good_step(const Rank& rank, const LlCase& c, xd_ep_group* group,
                      const std::vector<bool>& lost, int number) {
  Echo batch(rank, c, number);
  ok(finish(rank, group, batch.dispatch(group)));
  ASSERT_EQ(batch.rows_by_source(), batch.expected_rows(lost)) << "batch " << number;
  ok(finish(rank, group, batch.combine(group)));
  ASSERT_EQ(batch.wrong(lost), "");
}
inline void good_steps(const Rank& rank, const LlCase& c, xd_ep_group* group,
                       const std::vector<bool>& lost, int first, int count) {
  for (int number = first; number < first + count; ++number) {
    good_step(rank, c, group, lost, number);
  }
}

// Brings all ranks in step again, whatever has happened.
inline void come_back(const Rank& rank, const LlCase& c, xd_ep_group* group) {
  for (int peer = 0; peer < rank.num_ranks; ++peer) {
    if (peer != rank.rank) ok(xd_ep_ll_mask_set(group, peer, 0, rank.stream()));
  }
  rank.memory->synchronize();
  ok(xd_comm_barrier(rank.comm));
  ok(finish(rank, group, xd_ep_ll_reset(group, rank.stream())));
  good_steps(rank, c, group, nobody(rank.num_ranks), 5000, 20);
}

}  // namespace xd::test
