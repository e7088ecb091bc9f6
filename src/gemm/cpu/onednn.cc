#include "gemm/cpu/onednn.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <array>
#include <bit>
#include <optional>

#include "base/error.h"
#include "base/math.h"
#include "gemm/cpu/elements.h"
#include "gemm/cpu/limits.h"

namespace xd::gemm::cpu {
namespace {

// dnnl_sgemm of dnnl.h, which versions 2 and 3 have alike: dnnl_dim_t is int64_t, and dnnl_status_t
// an enum of int with dnnl_success = 0 and dnnl_out_of_memory = 1.
template <class Element>
using GemmFunction = int (*)(char, char, std::int64_t, std::int64_t, std::int64_t, float,
                             const Element*, std::int64_t, const Element*, std::int64_t, float,
                             float*, std::int64_t);

struct Library {
  GemmFunction<float> sgemm = nullptr;
  // Not in dnnl.h, but exported by both versions; nullptr also where the processor has no
  // instructions for it, or where it does not do what is expected of it.
  GemmFunction<Bf16> bgemm = nullptr;
  // Of the OpenMP runtime on which it stands; absent where it was built without.
  void (*set_threads)(int) = nullptr;
  int (*max_threads)() = nullptr;
};

template <class Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
}

bool processor_multiplies_bf16() {
#ifdef __x86_64__
  return __builtin_cpu_supports("avx512bf16") != 0;
#else
  return false;
#endif
}

// Tries it on [1 2; 3 4] times the transpose of [1 2; 3 4; 5 6], in rows that are longer.
bool is_right(GemmFunction<Bf16> bgemm) {
  const auto of = [](float value) {
    return static_cast<Bf16>(std::bit_cast<std::uint32_t>(value) >> 16);
  };
  const std::array a{of(1), of(2), of(9), of(3), of(4), of(9)};
  const std::array b{of(1), of(2), of(3), of(4), of(5), of(6)};
  std::array c{-1.0f, -1.0f, -1.0f, -1.0f, -1.0f, -1.0f};
  constexpr std::array kExpected{5.0f, 11.0f, 17.0f, 11.0f, 25.0f, 39.0f};
  return bgemm('N', 'T', 2, 3, 2, 1.0f, a.data(), 3, b.data(), 2, 0.0f, c.data(), 3) == 0 &&
         c == kExpected;
}

Library load() {
  Library library;
  for (const char* name : {"libdnnl.so.3", "libdnnl.so.2"}) {
    void* const handle = ::dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (handle == nullptr) continue;
    find(handle, "dnnl_sgemm", library.sgemm);
    // dlsym looks at what the library depends on, too.
    find(handle, "omp_set_num_threads", library.set_threads);
    find(handle, "omp_get_max_threads", library.max_threads);
    if (library.sgemm == nullptr) continue;
    require_memory();  // the library itself has taken some
    if (processor_multiplies_bf16()) find(handle, "dnnl_gemm_bf16bf16f32", library.bgemm);
    if (library.bgemm != nullptr && !is_right(library.bgemm)) library.bgemm = nullptr;
    return library;
  }
  return {};
}

const Library& library() {
  static const Library loaded = load();
  return loaded;
}

constexpr const char* kMissing =
    "products on the CPU need oneDNN: neither libdnnl.so.3 nor libdnnl.so.2 can be loaded "
    "(Debian and Ubuntu: apt-get install libdnnl-dev; package libdnnl2 or libdnnl3 is enough)";

void run_by_loop(const Sgemm& p) {
  for (std::int64_t i = 0; i < p.m; ++i) {
    float* const c = p.c + i * p.ldc;
    if (p.beta == 0.0f) std::fill_n(c, p.n, 0.0f);
    for (std::int64_t l = 0; l < p.k; ++l) {
      const float a = p.transpose_a == 'N' ? p.a[i * p.lda + l] : p.a[l * p.lda + i];
      if (p.transpose_b == 'N') {
        add_scaled(c, p.b + l * p.ldb, a, at(p.n));
      } else {
        for (std::int64_t j = 0; j < p.n; ++j) c[j] += a * p.b[j * p.ldb + l];
      }
    }
  }
}

template <class Element>
void run_by(GemmFunction<Element> gemm, const Gemm<Element>& p) {
  const double flop =
      2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  const int available = library().max_threads != nullptr ? library().max_threads() : 1;
  // Products of bfloat16 take about an eighth of the time.
  const int enough = threads_for(sizeof(Element) == 2 ? flop / 8 : flop, available);
  require_limits(enough);
  std::optional<Threads> fewer;
  if (enough < available) fewer.emplace(enough);
  const int status = gemm(p.transpose_a, p.transpose_b, p.m, p.n, p.k, 1.0f, p.a, p.lda, p.b, p.ldb,
                          p.beta, p.c, p.ldc);
  if (status == 1) fail(XD_ERROR_OUT_OF_MEMORY, "oneDNN has no memory for a product");
  XD_CHECK(status == 0);
}

}  // namespace

Feature onednn_feature() {
  try {
    return library().sgemm != nullptr ? Feature{true, "available"} : Feature{false, kMissing};
  } catch (const Error&) {  // it is loaded again when it is asked for again
    return {false, "products on the CPU need oneDNN, and there is no address space for it"};
  }
}

bool multiplies_bf16() { return library().bgemm != nullptr; }

int threads_for(double flop, int available) {
  // Enough that waking a thread, which takes some microseconds, costs less than it saves.
  constexpr double kFlopOfAThread = 5e5;
  return std::max(1, static_cast<int>(std::min<double>(available, flop / kFlopOfAThread)));
}

void run(const Sgemm& product) {
  if (library().sgemm == nullptr) return run_by_loop(product);
  run_by(library().sgemm, product);
}

void run(const Bgemm& product) { run_by(library().bgemm, product); }

int cores_per_rank(int ranks) {
  cpu_set_t cores;
  const int available = ::sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, available / ranks);
}

Threads::Threads(int count) : callers_(0) {
  if (library().set_threads == nullptr || library().max_threads == nullptr) return;
  callers_ = library().max_threads();
  library().set_threads(count);
}

Threads::~Threads() {
  if (callers_ > 0) library().set_threads(callers_);
}

}  // namespace xd::gemm::cpu
