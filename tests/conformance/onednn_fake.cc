// In place of oneDNN: its sgemm by plain loops, which tells a thread that it has no memory when a
// test says so.
#include <cstdint>

namespace {
thread_local int products_left = -1;  // before one fails; below 0: none does
}

extern "C" {

// The calling thread's product after so many more fails.
void fake_fail_after(int products) { products_left = products; }

int dnnl_sgemm(char transpose_a, char transpose_b, std::int64_t m, std::int64_t n, std::int64_t k,
               float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
               float beta, float* c, std::int64_t ldc) {
  constexpr int kOutOfMemory = 1;  // dnnl_out_of_memory
  if (products_left >= 0) {
    --products_left;
    if (products_left < 0) return kOutOfMemory;
  }
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      float sum = 0;
      for (std::int64_t l = 0; l < k; ++l) {
        const float left = transpose_a == 'T' ? a[l * lda + i] : a[i * lda + l];
        sum += left * (transpose_b == 'T' ? b[j * ldb + l] : b[l * ldb + j]);
      }
      c[i * ldc + j] = alpha * sum + (beta != 0 ? beta * c[i * ldc + j] : 0);
    }
  }
  return 0;
}
}
