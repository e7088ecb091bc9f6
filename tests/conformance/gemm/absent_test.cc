// Products on a machine without the library that computes them. The launch hides it.
#include <gtest/gtest.h>

#include <crossdock/crossdock.h>

#include <string>

#include "conformance/batch.h"
#include "conformance/case.h"
#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

// The text says what is missing, and which package has it.
void expect_the_need(const std::string& text) {
  for (const char* word :
       {"oneDNN", "libdnnl.so.3", "libdnnl.so.2", "apt-get install libdnnl-dev"}) {
    EXPECT_NE(text.find(word), std::string::npos) << "expected '" << word << "' in: " << text;
  }
}

TEST(AbsentOneDnn, IsToldByTheFeature) {
  const char* reason = nullptr;
  if (xd_feature_available(XD_FEATURE_CUDA, nullptr) != 0) {
    GTEST_SKIP() << "this machine's CUDA devices may compute products without oneDNN";
  }
  EXPECT_EQ(xd_feature_available(XD_FEATURE_GEMM, &reason), 0);
  expect_the_need(reason);
}

TEST(AbsentOneDnn, MakesContextsUnsupportedOnEveryRankAndAllElseWorks) {
  on_every_rank([](Rank& rank) {
    const xd_gemm_config config = plain_gemm_case(rank.num_ranks).config();
    for (int round = 0; round < 3; ++round) {
      xd_gemm_context* context = nullptr;
      EXPECT_EQ(xd_gemm_context_create(rank.comm, &config, &context), XD_ERROR_UNSUPPORTED);
      expect_the_need(xd_last_error());
      EXPECT_EQ(context, nullptr);
    }
    const Case c = plain_case(rank.num_ranks);
    const Group group = make_group(rank.comm, c.config(rank.rank));
    Batch batch(rank, c, 0, Place::ordinary);
    batch.prepare(group.get());
    ok(batch.call(group.get(), XD_EP_DISPATCH));
  });
}

}  // namespace
}  // namespace xd::test
