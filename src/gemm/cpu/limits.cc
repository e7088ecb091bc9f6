#include "gemm/cpu/limits.h"

#include <sys/mman.h>

#include <cstddef>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "base/thread.h"

namespace xd::gemm::cpu {
namespace {

// More than generated code and copies of operands take, for each type of elements.
constexpr std::size_t kBytes = std::size_t{64} << 20;

// Address space that may be written, as what is allocated is. None of it is touched.
class Mapping {
 public:
  Mapping()
      : base_(::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0)) {
    if (base_ == MAP_FAILED) {
      fail(XD_ERROR_OUT_OF_MEMORY, "products on the CPU need ", kBytes,
           " bytes of address space for oneDNN's code and copies, and there is less");
    }
  }
  ~Mapping() { ::munmap(base_, kBytes); }
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;

 private:
  void* const base_;
};

// Threads that are there all at once, and end.
void try_threads(int count) {
  struct Joined {
    ~Joined() {
      for (std::thread& thread : threads) thread.join();
    }
    std::vector<std::thread> threads;
  };
  std::mutex gate;
  Joined joined;  // and so joined when the gate is open
  const std::lock_guard closed(gate);
  joined.threads.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    joined.threads.push_back(
        start_thread("xd-product", [&gate] { const std::lock_guard pass(gate); }));
  }
}

}  // namespace

void require_memory() { const Mapping memory; }

void require_limits(int threads) {
  // OpenMP's runtime has threads for each thread that computes.
  static thread_local int had = 0;
  if (threads <= had) return;
  const Mapping memory;
  try_threads(threads - 1);
  had = threads;
}

}  // namespace xd::gemm::cpu
