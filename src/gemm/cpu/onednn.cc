#include "gemm/cpu/onednn.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <optional>

#include "base/error.h"

namespace xd::gemm::cpu {
namespace {

// dnnl_sgemm of dnnl.h, which versions 2 and 3 have alike: dnnl_dim_t is int64_t, and dnnl_status_t
// an enum of int with dnnl_success = 0 and dnnl_out_of_memory = 1.
using SgemmFunction = int (*)(char, char, std::int64_t, std::int64_t, std::int64_t, float,
                              const float*, std::int64_t, const float*, std::int64_t, float, float*,
                              std::int64_t);

struct Library {
  SgemmFunction sgemm = nullptr;
  // Of the OpenMP runtime on which it stands; absent where it was built without.
  void (*set_threads)(int) = nullptr;
  int (*max_threads)() = nullptr;
};

template <class Function>
void find(void* handle, const char* name, Function& function) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
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
    if (library.sgemm != nullptr) return library;
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

}  // namespace

Feature onednn_feature() {
  return library().sgemm != nullptr ? Feature{true, "available"} : Feature{false, kMissing};
}

int threads_for(const Sgemm& p, int available) {
  // Enough that waking a thread, which takes some microseconds, costs less than it saves.
  constexpr double kFlopOfAThread = 5e5;
  const double flop =
      2.0 * static_cast<double>(p.m) * static_cast<double>(p.n) * static_cast<double>(p.k);
  return std::max(1, static_cast<int>(std::min<double>(available, flop / kFlopOfAThread)));
}

void run(const Sgemm& p) {
  if (library().sgemm == nullptr) fail(XD_ERROR_UNSUPPORTED, kMissing);
  const int available = library().max_threads != nullptr ? library().max_threads() : 1;
  const int enough = threads_for(p, available);
  std::optional<Threads> fewer;
  if (enough < available) fewer.emplace(enough);
  const int status = library().sgemm(p.transpose_a, p.transpose_b, p.m, p.n, p.k, 1.0f, p.a, p.lda,
                                     p.b, p.ldb, p.beta, p.c, p.ldc);
  if (status == 1) fail(XD_ERROR_OUT_OF_MEMORY, "oneDNN has no memory for a product");
  XD_CHECK(status == 0);
}

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
