// The operands of a measured product: small integers, so that their sums are exact in float32 in
// whatever order they are added, and all ways to compute them end with equal bits.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "../workload.h"
#include "shape.h"

namespace bench {

// One measured product on all ranks.
struct GemmProblem {
  GemmShape shape;
  std::int64_t tokens = 0;  // M, of all ranks
  Element element = Element::fp32;
  std::uint64_t seed = 1;
  int ranks = 0;
  int iters = 0, warmup = 0;
  bool cublasmp = false;  // cuBLASMp's algorithms, too

  bool gathers() const { return shape.operation == XD_GEMM_ALL_GATHER; }
  bool scatters() const { return shape.operation == XD_GEMM_REDUCE_SCATTER; }
  std::int64_t tokens_of(int rank) const;
  std::int64_t first_token(int rank) const;
  std::int64_t most_tokens() const { return tokens_of(0); }
  std::vector<std::int64_t> tokens_per_rank() const;
  std::size_t element_bytes() const { return element == Element::fp32 ? 4 : 2; }
  double flop() const;  // of one rank
};

// Writes the rows of a [.,K] and b [N,K] that a rank begins with. all_gather: `a` has the rank's
// tokens; else all tokens.
void fill_a(const GemmProblem& problem, int rank, void* a);
void fill_b(const GemmProblem& problem, int rank, void* b);

// How often a sum over ranks is rounded: once, as the library adds in float32, or after every
// addition, as a collective does that adds in the type of the elements (NCCL).
enum class Sums { rounded_once, rounded_each_time };

// Compares elements here and there of the rows of d [.,N] that a rank ends with with exact sums,
// as far as roundings allow. Returns the first difference as a text, empty if there is none.
std::string check_result(const GemmProblem& problem, int rank, const void* d,
                         Sums sums = Sums::rounded_once);

}  // namespace bench
