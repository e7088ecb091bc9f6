// Contexts of products on communicators of GPUs.
#include <gtest/gtest.h>

#include <string>

#include "conformance/gemm_batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

TEST(GemmContexts, OfGpusAreUnsupportedOnEveryRankAndTheTextSaysWhatWorks) {
  on_every_rank([](Rank& rank) {
    const xd_gemm_config config = plain_gemm_case(rank.num_ranks).config();
    for (int round = 0; round < 2; ++round) {
      xd_gemm_context* context = nullptr;
      EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &context), XD_ERROR_UNSUPPORTED);
      EXPECT_EQ(context, nullptr);
      EXPECT_NE(std::string(xd_last_error()).find("device = kDLCUDA, expected kDLCPU"),
                std::string::npos)
          << xd_last_error();
      ok(xd_comm_barrier(rank.comm));  // the communicator goes on
    }
  });
}

}  // namespace
}  // namespace xd::test
