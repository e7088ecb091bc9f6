// Memory of the device that an executor computes on, behind one small interface, so that test
// bodies are the same for every executor.
#pragma once

#include <dlpack/dlpack.h>

#include <cstddef>
#include <memory>
#include <string>

namespace xd::test {

class Memory {
 public:
  virtual ~Memory() = default;
  virtual DLDevice device() const = 0;
  // 256-byte aligned.
  virtual void* allocate(std::size_t bytes) = 0;
  virtual void release(void* ptr) = 0;
  // Either side may be this memory or symmetric memory of the same device. Returns when done.
  virtual void copy_in(void* device, const void* host, std::size_t bytes) = 0;
  virtual void copy_out(void* host, const void* device, std::size_t bytes) = 0;
  // Returns when all that was enqueued on the device has finished.
  virtual void synchronize() = 0;
};

// `executor` as given on the command line: "cpu". Throws std::invalid_argument for another.
std::unique_ptr<Memory> make_memory(const std::string& executor);

}  // namespace xd::test
