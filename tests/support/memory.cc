#include "support/memory.h"

#include <cstring>
#include <new>
#include <stdexcept>

namespace xd::test {
namespace {

class HostMemory final : public Memory {
 public:
  DLDevice device() const override { return {kDLCPU, 0}; }
  void* allocate(std::size_t bytes) override { return ::operator new(bytes, kAlign); }
  void release(void* ptr) override { ::operator delete(ptr, kAlign); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    if (bytes > 0) std::memcpy(host, device, bytes);
  }
  void synchronize() override {}

 private:
  static constexpr std::align_val_t kAlign{256};
};

}  // namespace

std::unique_ptr<Memory> make_memory(const std::string& executor) {
  if (executor == "cpu") return std::make_unique<HostMemory>();
  throw std::invalid_argument("--executor=" + executor + ", expected cpu");
}

}  // namespace xd::test
