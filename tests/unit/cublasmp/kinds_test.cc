// The kinds of products that all ranks know cuBLASMp to take or to refuse.
#include "gemm/cublasmp/kinds.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "gemm/calls.h"
#include "unit/cublasmp/support.h"

namespace xd::gemm::cublasmp {
namespace {

class CublasMpKinds : public CublasMpEngine {
 protected:
  static Record record_of(const ProductCall& call) { return gemm::record_of(call, call.algo); }
  Record record() const { return record_of(call()); }
};

// Of another kind is what cuBLASMp may judge otherwise: a size, a type, an operand.
TEST_F(CublasMpKinds, TellsProductsApartThatCublasMpMayJudgeOtherwise) {
  Kinds kinds;
  EXPECT_FALSE(kinds.has_taken(record()));
  kinds.note_taken(record());
  EXPECT_TRUE(kinds.has_taken(record()));
  const std::vector<std::int64_t> other_starts{0, 4, 8};
  std::vector<ProductCall> others(6, call());
  ++others[0].n;
  others[1].d.type = DType::f32;
  others[2].b_scale.given = true;
  others[3].c.given = true;
  others[4].algo = XD_GEMM_ALGO_CUBLASMP;
  others[5].shares = Shares(other_starts);
  for (const ProductCall& other : others) EXPECT_FALSE(kinds.has_taken(record_of(other)));
  Record finished = record();
  finished.given |= kIsFinished;
  EXPECT_FALSE(kinds.has_taken(finished));
}

// Ranks would otherwise know different kinds, and some alone would come to a second meeting.
TEST_F(CublasMpKinds, TellsNoProductsApartByFactsThatRanksDoNotCompare) {
  Kinds kinds;
  ProductCall one = call();
  one.bias.given = true;
  one.bias.type = DType::bf16;
  kinds.note_taken(record_of(one));
  ProductCall other = one;
  other.bias.type = DType::f32;
  other.alpha = 3;
  other.tag = 5;  // compared, and nothing to cuBLASMp
  other.a.data = other.d.data = reinterpret_cast<std::byte*>(64);
  EXPECT_TRUE(kinds.has_taken(record_of(other)));
}

TEST_F(CublasMpKinds, KnowsARefusalAndItsReason) {
  Kinds kinds;
  EXPECT_EQ(kinds.refusal(record()), "");
  kinds.note_refused(record(), "fake reason");
  EXPECT_EQ(kinds.refusal(record()), "fake reason");
  EXPECT_FALSE(kinds.has_taken(record()));
  ProductCall other = call();
  other.algo = XD_GEMM_ALGO_CUBLASMP;
  EXPECT_EQ(kinds.refusal(record_of(other)), "");
}

}  // namespace
}  // namespace xd::gemm::cublasmp
