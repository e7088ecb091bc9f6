// Records by which ranks tell one another of a product, and how they name what differs.
#include <gtest/gtest.h>

#include <array>
#include <string>
#include <vector>

#include "gemm/calls.h"
#include "gemm/config.h"
#include "gemm/family.h"
#include "turn/disagreement.h"
#include "unit/errors.h"

namespace xd::gemm {
namespace {

using test::expect_words;

ProductCall a_call(xd_gemm_operation operation) {
  ProductCall call{.operation = operation};
  call.a.type = call.b.type = call.d.type = DType::bf16;
  call.a_rows = call.n = call.k = 16;
  return call;
}

// Rank 0 and rank 1 agree, and rank 2 has `theirs`.
OperationError disagreement(const Record& mine, const Record& theirs) {
  const std::array<Record, 3> records = {mine, mine, theirs};
  return turn::disagreement<Family>(records, 0);
}

TEST(GemmRecord, NamesTheOperandThatOneRankAloneGivesToCublasMp) {
  struct Case {
    const char* name;
    Tensor ProductCall::*tensor;
  };
  const std::vector<Case> cases = {
      {"c", &ProductCall::c},
      {"bias", &ProductCall::bias},
      {"pre_activation", &ProductCall::pre_activation},
      {"bias_grad", &ProductCall::bias_grad},
      {"d_amax", &ProductCall::d_amax},
      {"b_scale", &ProductCall::b_scale},
  };
  const std::vector<std::int64_t> starts = {0, 16, 32};
  for (const xd_gemm_operation operation : {XD_GEMM_ALL_GATHER, XD_GEMM_REDUCE_SCATTER}) {
    for (const Case& c : cases) {
      ProductCall without = a_call(operation);
      without.shares = Shares(starts);
      ProductCall with = without;
      (with.*c.tensor).given = true;
      for (int algo = XD_GEMM_ALGO_CUBLASMP; algo <= XD_GEMM_ALGO_CUBLASMP_FUSED; ++algo) {
        const auto by = static_cast<xd_gemm_algo>(algo);
        const Record mine = record_of(without, by), theirs = record_of(with, by);
        const OperationError given = disagreement(mine, theirs);
        EXPECT_EQ(given.status, XD_ERROR_MISMATCH) << c.name;
        EXPECT_EQ(given.rank, 2);
        expect_words(given.text, {std::string("rank 2: ") + c.name + " given, here NULL"});
        const OperationError missing = disagreement(theirs, mine);
        expect_words(missing.text, {std::string("rank 2: ") + c.name + " NULL, here given"});
        EXPECT_FALSE(disagreement(theirs, theirs)) << missing.text;
      }
    }
  }
}

// The library's own algorithms leave these operands to each rank, but for some of all_reduce.
TEST(GemmRecord, LeavesOperandsToEachRankWhereTheyDecideNothingForTheOthers) {
  const std::vector<std::int64_t> starts = {0, 16, 32};
  ProductCall without = a_call(XD_GEMM_REDUCE_SCATTER);
  without.shares = Shares(starts);
  ProductCall with = without;
  for (Tensor* tensor :
       {&with.c, &with.bias, &with.pre_activation, &with.bias_grad, &with.d_amax, &with.b_scale}) {
    tensor->given = true;
  }
  EXPECT_FALSE(disagreement(record_of(without, XD_GEMM_ALGO_SEQUENTIAL),
                            record_of(with, XD_GEMM_ALGO_SEQUENTIAL)));
}

// A rank that takes another algorithm says that, and not what follows from it.
TEST(GemmRecord, NamesTheAlgorithmBeforeWhatItMakesOfACall) {
  ProductCall call = a_call(XD_GEMM_ALL_REDUCE);
  call.bias.given = true;
  const OperationError found = disagreement(record_of(call, XD_GEMM_ALGO_SEQUENTIAL),
                                            record_of(call, XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P));
  expect_words(found.text, {"algo CUBLASMP_SPLIT_P2P, here SEQUENTIAL"});
}

TEST(GemmRecord, NamesABiasThatCublasMpCannotAdd) {
  ProductCall call = a_call(XD_GEMM_ALL_REDUCE);
  const Record mine = record_of(call, XD_GEMM_ALGO_CUBLASMP);
  Record theirs = mine;
  theirs.given |= kIsFinished;
  const OperationError found = disagreement(mine, theirs);
  EXPECT_EQ(found.status, XD_ERROR_MISMATCH);
  expect_words(found.text, {"multiple of 16 bytes: 1, here 0"});
}

}  // namespace
}  // namespace xd::gemm
