// The kinds of products that all ranks know cuBLASMp to take or to refuse.
#include "gemm/cublasmp/kinds.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "gemm/calls.h"
#include "unit/cublasmp/support.h"
#include "unit/errors.h"

namespace xd::gemm::cublasmp {
namespace {

using test::error_of;
using test::expect_error;
using test::expect_words;

// An engine on the library of the tests, and two ranks that know kinds.
class CublasMpKinds : public CublasMpEngine {
 protected:
  static Record record_of(const ProductCall& call) { return gemm::record_of(call, call.algo); }
  Record record() const { return record_of(call()); }

  // Enqueues a product where Matmul ends with that status, and a meeting as told.
  TakenBy enqueue(Kinds& kinds, const Record& record, mp::Status status, bool all_alike) {
    fake_.begin(status == mp::kSuccess ? "" : "Matmul", status);
    meetings_.clear();
    return kinds.enqueue(
        record,
        [&] { engine_.enqueue(description(), operands_of(call(), nullptr, false), nullptr); },
        [&](const Record& brought) {
          meetings_.push_back(brought);
          return all_alike;
        });
  }
  TakenBy take(Kinds& kinds, const Record& record) {
    return enqueue(kinds, record, mp::kSuccess, true);
  }
  bool meets_for(Kinds& kinds, const Record& record) {
    take(kinds, record);
    return !meetings_.empty();
  }

  Engine engine_{fake_.library(), config_, ranks(), xd::cuda::Stream()};
  std::vector<Record> meetings_;  // of the last product: the records of this rank
};

// Of another kind is what cuBLASMp may judge otherwise: a size, a type, an operand.
TEST_F(CublasMpKinds, MeetsForTheFirstProductOfAKind) {
  Kinds kinds;
  EXPECT_TRUE(meets_for(kinds, record()));
  EXPECT_FALSE(meets_for(kinds, record()));
  const std::vector<std::int64_t> other_starts{0, 4, 8};
  std::vector<ProductCall> others(6, call());
  ++others[0].n;
  others[1].d.type = DType::f32;
  others[2].b_scale.given = true;
  others[3].c.given = true;
  others[4].algo = XD_GEMM_ALGO_CUBLASMP;
  others[5].shares = Shares(other_starts);
  for (const ProductCall& other : others) EXPECT_TRUE(meets_for(kinds, record_of(other)));
  Record finished = record();
  finished.given |= kIsFinished;
  EXPECT_TRUE(meets_for(kinds, finished));
}

// Ranks would otherwise know different kinds, and some alone would come to a meeting.
TEST_F(CublasMpKinds, TellsNoProductsApartByFactsThatRanksDoNotCompare) {
  Kinds kinds;
  ProductCall one = call();
  one.bias.given = true;
  one.bias.type = DType::bf16;
  EXPECT_TRUE(meets_for(kinds, record_of(one)));
  ProductCall other = one;
  other.bias.type = DType::f32;
  other.alpha = 3;
  other.tag = 5;  // compared, and nothing to cuBLASMp
  other.a.data = other.d.data = reinterpret_cast<std::byte*>(64);
  EXPECT_FALSE(meets_for(kinds, record_of(other)));
}

TEST_F(CublasMpKinds, RemembersARefusalThatAllRanksShare) {
  for (const mp::Status status :
       {mp::kInvalidValue, mp::kArchitectureMismatch, mp::kNotSupported}) {
    Kinds kinds;
    EXPECT_EQ(kinds.obstacle(record()), "");
    EXPECT_EQ(enqueue(kinds, record(), status, true), TakenBy::none);
    expect_words(kinds.obstacle(record()), {"cublasMpMatmul: fake reason"});
    ProductCall other = call();
    other.algo = XD_GEMM_ALGO_CUBLASMP;
    EXPECT_EQ(kinds.obstacle(record_of(other)), "");
  }
}

// The answers meet, so the ranks differ where their answers do, and name that.
TEST_F(CublasMpKinds, BringsARefusalToTheMeetingWithThePeers) {
  Kinds refusing, taking;
  enqueue(refusing, record(), mp::kNotSupported, true);
  ASSERT_EQ(meetings_.size(), 1u);
  const Record refused = meetings_[0];
  take(taking, record());
  ASSERT_EQ(meetings_.size(), 1u);
  const Record taken = meetings_[0];
  EXPECT_FALSE(same_operation(refused, taken));
  expect_words(Family::difference(taken, refused), {"refused by cuBLASMp: 1, here 0"});
  expect_words(Family::difference(refused, taken), {"refused by cuBLASMp: 0, here 1"});
}

// A context of which one rank goes on by cuBLASMp and another does not would compute nothing.
TEST_F(CublasMpKinds, TakesNoProductAnyMoreWhereSomeRanksAloneRefuseOne) {
  ProductCall other = call();
  ++other.n;
  for (const mp::Status status : {mp::kSuccess, mp::kNotSupported}) {
    Kinds kinds;
    take(kinds, record_of(other));
    EXPECT_EQ(enqueue(kinds, record(), status, false), TakenBy::some);
    for (const Record& any : {record(), record_of(other)}) {
      expect_words(
          kinds.obstacle(any),
          {"refused a product on some ranks",
           status == mp::kSuccess ? "here it has taken it" : "has refused it: cublasMpMatmul"});
    }
  }
}

// The peers, which know the kind, do not come to a meeting: another turn would meet their next.
TEST_F(CublasMpKinds, FailsWhereAKindIsRefusedThatAllRanksHaveTaken) {
  for (const mp::Status status :
       {mp::kInvalidValue, mp::kArchitectureMismatch, mp::kNotSupported}) {
    Kinds kinds;
    EXPECT_EQ(take(kinds, record()), TakenBy::all);
    expect_error(error_of([&] { enqueue(kinds, record(), status, true); }), XD_ERROR_INTERNAL,
                 "cublasMpMatmul: fake reason, though it has taken such a product before");
    EXPECT_TRUE(meetings_.empty());
    EXPECT_EQ(kinds.obstacle(record()), "");
  }
}

// All ranks forget in the same turn, whichever kinds are taken and refused.
TEST_F(CublasMpKinds, ForgetsAllKindsWhereItKnowsTooMany) {
  Kinds kinds;
  ProductCall other = call();
  for (std::size_t i = 0; i < Kinds::kMost; ++i) {
    other.n = call().n + static_cast<std::int64_t>(i);
    const bool refused = i % 2 != 0;
    enqueue(kinds, record_of(other), refused ? mp::kNotSupported : mp::kSuccess, true);
  }
  EXPECT_FALSE(meets_for(kinds, record()));
  EXPECT_NE(kinds.obstacle(record_of(other)), "");
  ++other.n;
  enqueue(kinds, record_of(other), mp::kNotSupported, true);
  EXPECT_NE(kinds.obstacle(record_of(other)), "") << "the last one is known";
  --other.n;
  EXPECT_EQ(kinds.obstacle(record_of(other)), "");
  EXPECT_TRUE(meets_for(kinds, record()));
}

TEST_F(CublasMpKinds, RemembersNoProductThatHasFailedOtherwise) {
  Kinds kinds;
  expect_error(error_of([&] { enqueue(kinds, record(), 6, true); }), XD_ERROR_INTERNAL,
               "cublasMpMatmul: fake reason");
  EXPECT_TRUE(meetings_.empty());
  EXPECT_EQ(kinds.obstacle(record()), "");
  EXPECT_TRUE(meets_for(kinds, record()));
}

}  // namespace
}  // namespace xd::gemm::cublasmp
