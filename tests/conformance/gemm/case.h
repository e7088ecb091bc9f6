// One case of the products' grid: a value in each dimension, and what follows from them.
#pragma once

#include <crossdock/gemm.h>

#include <cstdint>
#include <string>
#include <vector>

#include "support/tensor.h"

namespace xd::test {

// Element types of a and b.
enum class Operands { bf16, f16, f32, e4m3, e4m3_e5m2, e5m2_e4m3 };

// Element type of d. c and pre_activation have it as well, or bf16 where it has 8 bits.
enum class Output {
  like_operands,  // bf16 where those have 8 bits
  f32,
  other_half,  // fp16 where the operands are bf16, else bf16
  e4m3,
  e5m2,
};

enum class Scaling { none, tensor, row, block };

// How a and b are stored.
enum class Stored { nt, nn, tn };  // transpose_a, transpose_b = (0, 1), (0, 0), (1, 0)

enum class Addend {
  none,
  added,     // c is a tensor of its own
  in_place,  // c is d
  unscaled,  // c is given, and beta is 0
};

enum class Bias { none, like_d, f32 };

enum class BiasGrad { none, own, reduced };

enum class TokenCounts {
  equal,      // tokens_per_rank is NULL
  announced,  // equal, and tokens_per_rank says so
  uneven,
  holes,  // no tokens on some ranks
  few,    // fewer tokens than ranks
  one,
  none,
  most,  // max_tokens everywhere
};

enum class Gathered { none, given, kept, both };

enum class Values {
  integers,  // every sum is exact
  random,
};

enum class Spots { ordinary, symmetric, mixed };

struct GemmCase {
  std::uint64_t seed = 0;
  int num_ranks = 1;
  xd_gemm_operation operation = XD_GEMM_ALL_GATHER;
  Operands operands = Operands::bf16;
  Output result = Output::like_operands;
  Scaling scaling = Scaling::none;
  Stored stored = Stored::nt;
  float alpha = 1;
  Addend addend = Addend::none;
  Bias bias = Bias::none;
  xd_gemm_epilogue epilogue = XD_GEMM_EPILOGUE_NONE;
  bool pre_activation = false;  // also written by GELU and RELU
  BiasGrad bias_grad = BiasGrad::none;
  bool amax = false;
  TokenCounts tokens = TokenCounts::equal;
  Gathered gathered = Gathered::none;
  Values values = Values::integers;
  Spots spots = Spots::ordinary;
  bool exact_terms = false;               // terms of a sum travel as float32, whatever d is
  std::int64_t n_units = 1, k_units = 1;  // of unit() elements
  std::int64_t token_units = 4;           // the context's bound, of token_unit() tokens
  xd_gemm_algo algo = XD_GEMM_ALGO_AUTO;  // the context's

  static constexpr int kSteps = 2;  // numbers of tokens that go through the context

  DLDataType a_type() const;
  DLDataType b_type() const;
  DLDataType d_type() const;
  DLDataType side_type() const;  // of c and pre_activation
  DLDataType term_type() const { return exact_terms ? kF32 : side_type(); }  // of a sum
  bool fp8() const { return operands >= Operands::e4m3; }
  bool scaled_output() const { return result >= Output::e4m3; }
  Scaling scales() const { return fp8() ? scaling : Scaling::none; }
  bool transpose_a() const { return stored == Stored::tn; }
  bool transpose_b() const { return stored == Stored::nt; }
  float beta() const;
  // True where d has no exact values in float32.
  bool curved() const;
  bool reads_pre_activation() const;
  bool has_pre_activation() const { return pre_activation || reads_pre_activation(); }
  bool gathers() const { return operation == XD_GEMM_ALL_GATHER; }
  bool keeps_gathered() const {
    return gathers() && (gathered == Gathered::kept || gathered == Gathered::both);
  }
  bool gives_gathered() const {
    return gathers() && (gathered == Gathered::given || gathered == Gathered::both);
  }

  // Multiple of which N and K are, so that rows are multiples of 16 bytes however they are stored.
  std::int64_t unit() const;
  // Likewise of numbers of tokens, which are columns of a transposed a.
  std::int64_t token_unit() const;
  std::int64_t n() const { return n_units * unit(); }
  std::int64_t k() const { return k_units * unit(); }
  std::int64_t max_tokens() const { return token_units * token_unit(); }
  std::vector<std::int64_t> tokens_of(int step) const;  // by rank
  bool announces_tokens() const { return tokens != TokenCounts::equal; }
  Place place(int tensor, int rank) const;  // `tensor` is any number

  xd_gemm_config config() const;
  std::string description() const;
};

// Cases for this number of ranks: all pairs of values, then random samples. The seed is
// XD_TEST_SEED, else 1; XD_TEST_FULL=1 makes many more. So many ranks that most of them wait for a
// core cost much and show little more than four: more than four have only every third case, and
// those are others where ranks are `threads`, unless XD_TEST_FULL=1.
std::vector<GemmCase> all_gemm_cases(int num_ranks, bool threads);

// A case without anything special: bf16, N and K of some tiles, uneven tokens.
GemmCase plain_gemm_case(int num_ranks, xd_gemm_operation operation = XD_GEMM_ALL_GATHER);

// Asks for all that may come with a product.
void ask_for_everything(GemmCase& c);

// Its operands have 8 bits, with scales of blocks, and sizes that every executor takes.
GemmCase block_gemm_case(int num_ranks, xd_gemm_operation operation);

}  // namespace xd::test
