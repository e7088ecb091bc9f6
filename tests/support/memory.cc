#include "support/memory.h"

#include <cstring>
#include <limits>
#include <new>

#include "support/memory_cuda.h"

namespace xd::test {
namespace {

class HostMemory final : public Memory {
 public:
  DLDevice device() const override { return {kDLCPU, 0}; }
  xd_stream stream() const override { return nullptr; }
  void* allocate(std::size_t bytes) override { return ::operator new(bytes, kAlign); }
  void release(void* ptr) override { ::operator delete(ptr, kAlign); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void synchronize() override {}
  std::unique_ptr<Memory> another_stream() const override { return std::make_unique<HostMemory>(); }
  std::unique_ptr<Memory> of_virtual_memory() const override { return nullptr; }
  std::size_t device_bytes_used() const override { return 0; }

 private:
  static constexpr std::align_val_t kAlign{256};
};

[[noreturn]] void unknown(const std::string& executor) {
  throw std::invalid_argument("--executor=" + executor + ", expected cpu or cuda");
}

}  // namespace

std::unique_ptr<Memory> make_memory(const std::string& executor, int rank) {
  if (executor == "cpu") return std::make_unique<HostMemory>();
  if (executor == "cuda") return make_cuda_memory(rank);
  unknown(executor);
}

int device_count(const std::string& executor) {
  if (executor == "cpu") return std::numeric_limits<int>::max();
  if (executor == "cuda") return cuda_device_count();
  unknown(executor);
}

#if !defined(XD_CUDA)
std::unique_ptr<Memory> make_cuda_memory(int) {
  throw Unavailable("these tests were built without CUDA");
}
int cuda_device_count() { throw Unavailable("these tests were built without CUDA"); }
#endif

}  // namespace xd::test
