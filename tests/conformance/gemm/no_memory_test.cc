// Products of a rank whose oneDNN runs out of memory. The launch puts a library of the tests into
// oneDNN's place.
#include <dlfcn.h>
#include <gtest/gtest.h>

#include <string>

#include "conformance/gemm/batch.h"
#include "support/gtest_main.h"

namespace xd::test {
namespace {

void fail_after(int products) {
  void* const fake = ::dlopen("libdnnl.so.3", RTLD_NOW | RTLD_LOCAL);
  ASSERT_NE(fake, nullptr) << ::dlerror();
  const auto tell = reinterpret_cast<void (*)(int)>(::dlsym(fake, "fake_fail_after"));
  ASSERT_NE(tell, nullptr) << "the launch found another oneDNN";
  tell(products);
}

// A rank fails in its first product or in its second one, where it has one.
struct Failure {
  GemmCase c;
  xd_gemm_algo algo;
  int products;
};

void expect_failure(const Rank& rank, xd_gemm_context* context, const Failure& failure) {
  const int guilty = rank.num_ranks - 1;
  GemmBatch batch(rank, failure.c, 0);
  batch.args.algo = failure.algo;
  xd_gemm_plan_info info = XD_GEMM_PLAN_INFO_INIT;
  if (xd_gemm_explain(context, failure.c.operation, &batch.args, &info) != XD_SUCCESS) return;
  if (rank.rank == guilty) fail_after(failure.products);
  const GemmOutcome outcome = batch.call(context);
  fail_after(-1);
  if (failure.products >= info.num_products) {
    ok(outcome);
    batch.check(context);
  } else if (rank.rank == guilty) {
    EXPECT_EQ(outcome, XD_ERROR_OUT_OF_MEMORY);
    EXPECT_TRUE(outcome.mentions("oneDNN")) << outcome.text;
  } else if (outcome == XD_SUCCESS) {
    // It has got all that it needs: rows need no product of others, sums and column sums do.
    EXPECT_FALSE(failure.c.operation == XD_GEMM_ALL_REDUCE ||
                 failure.c.bias_grad == BiasGrad::reduced);
    batch.check(context);
  } else {
    EXPECT_EQ(outcome, XD_ERROR_MISMATCH);
    EXPECT_TRUE(outcome.mentions("failed in the operation")) << outcome.text;
    EXPECT_FALSE(failure.c.gathers() && failure.c.bias_grad != BiasGrad::reduced);
  }
  // The context goes on.
  batch.reset();
  batch.call_and_check(context);
}

TEST(WithoutMemory, ARankFailsAloneAndNobodySumsWhatIsNotThere) {
  for (const xd_gemm_operation operation : kGemmProducts) {
    for (const BiasGrad bias_grad : {BiasGrad::own, BiasGrad::reduced}) {
      if (operation == XD_GEMM_ALL_REDUCE && bias_grad == BiasGrad::reduced) continue;
      on_every_rank([&](Rank& rank) {
        GemmCase c = plain_gemm_case(rank.num_ranks, operation);
        c.tokens = TokenCounts::most;
        c.bias_grad = bias_grad;
        const GemmContext context = make_context(rank.comm, c.config());
        for (const xd_gemm_algo algo : kGemmAlgos) {
          for (const int products : {0, 1}) {
            SCOPED_TRACE(std::string(name_of(operation)) + ", algorithm " + std::to_string(algo) +
                         ", product " + std::to_string(products));
            expect_failure(rank, context.get(), {c, algo, products});
          }
        }
      });
    }
  }
}

}  // namespace
}  // namespace xd::test
