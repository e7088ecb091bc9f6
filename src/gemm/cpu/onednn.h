// oneDNN, which computes the products. It is loaded when the first context is made, so that a
// machine without it lacks products and nothing else.
#pragma once

#include <cstdint>

#include "comm/feature.h"

namespace xd::gemm::cpu {

// Whether it is there. Loads it.
Feature onednn_feature();

// C [m,n] = op(A) * op(B) + beta * C, all row-major; a transposed operand is given by 'T'. Throws
// OUT_OF_MEMORY where oneDNN has no room for its copies. Where it is not there, a plain loop adds
// up terms in order of K: contexts refuse that, as it is slow.
template <class Element>
struct Gemm {
  char transpose_a, transpose_b;
  std::int64_t m, n, k;
  const Element* a;
  std::int64_t lda;
  const Element* b;
  std::int64_t ldb;
  float beta;  // 0 or 1
  float* c;
  std::int64_t ldc;
};
using Sgemm = Gemm<float>;
void run(const Sgemm& product);

// Likewise of bfloat16, by the processor's instructions for it: several times as fast as of
// float32. Only where multiplies_bf16().
enum class Bf16 : std::uint16_t { one = 0x3f80 };
using Bgemm = Gemm<Bf16>;
bool multiplies_bf16();
void run(const Bgemm& product);

// Of so many threads that are there, those that it is worth to wake for a product of so many
// floating-point operations in float32.
int threads_for(double flop, int available);

// The cores that one of `ranks` ranks of this host has to itself; at least 1.
int cores_per_rank(int ranks);

// From here to the end of the scope products of this thread use so many threads.
class Threads {
 public:
  explicit Threads(int count);
  ~Threads();
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;

 private:
  int callers_;
};

}  // namespace xd::gemm::cpu
