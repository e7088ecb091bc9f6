// A good step of low latency, looked at in full.
#pragma once

#include <gtest/gtest.h>

#include <vector>

#include "conformance/ll_echo.h"

namespace xd::test {

// dispatch and combine of batch `number`, which give what the ranks that are not `lost` sent.
inline void good_step(const Rank& rank, const LlCase& c, xd_ep_group* group,
                      const std::vector<bool>& lost, int number) {
  Echo batch(rank, c, number);
  ok(finish(rank, group, batch.dispatch(group)));
  ASSERT_EQ(batch.rows_by_source(), batch.expected_rows(lost)) << "batch " << number;
  ok(finish(rank, group, batch.combine(group)));
  ASSERT_EQ(batch.wrong(lost), "");
}

}  // namespace xd::test
