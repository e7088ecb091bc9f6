// A mistake of one rank in a collective call: all ranks learn of it at once, and it finishes
// nothing.
#pragma once

#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "conformance/said.h"
#include "support/gtest_main.h"

namespace xd::test {

// Rank 0 calls wrong(&made), the others call right(&made). `part`: of the error's text. `none`:
// what `made` is afterwards, on all ranks.
template <class Made, class Wrong, class Right>
void expect_mistake(const Rank& rank, const std::string& part, Made none, Wrong&& wrong,
                    Right&& right) {
  SCOPED_TRACE(part);
  const auto before = std::chrono::steady_clock::now();
  Made made = none;
  if (rank.rank == 0) {
    expect_error(wrong(&made), XD_ERROR_INVALID_ARGUMENT, part);
  } else {
    const xd_status status = right(&made);
    expect_error(status, XD_ERROR_MISMATCH, "rank 0 failed: ");
    expect_error(status, XD_ERROR_MISMATCH, part);
  }
  EXPECT_EQ(made, none);
  EXPECT_LT(std::chrono::steady_clock::now() - before,
            std::chrono::milliseconds(Rank::kTimeoutMs / 4));
  EXPECT_EQ(comm_error(rank.comm).status, XD_SUCCESS);
}

}  // namespace xd::test
