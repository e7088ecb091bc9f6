// The benchmark's use of CUDA: checked calls, and a GPU as a device of measurements. Its memory is
// never freed behind a running kernel.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "../device.h"

namespace bench::gpu {

// Throws std::runtime_error naming `what` and CUDA's reason.
void ok(cudaError_t error, const char* what);

// The number of devices; 0 without a driver, with the reason in *why.
int count_devices(std::string* why);

// Memory of a stream's pool is closed to other devices. NCCL reads a peer's memory in place where
// both ranks are in one process, so that what it moves is open.
enum class Pool { closed, open };

// The current device, with a non-blocking stream of its own: the legacy default stream would make
// ranks that share a device wait for each other.
class Stream : public ComputeDevice {
 public:
  explicit Stream(Pool pool = Pool::closed);
  ~Stream() override;
  operator cudaStream_t() const { return stream_; }

  DLDevice dl() const override { return {kDLCUDA, device_}; }
  xd_stream stream() const override { return stream_; }
  void wait(const char* what) const override;
  void* alloc(std::size_t bytes) const override;
  void free(void* data, std::size_t bytes) const override;
  void fill(void* data, int byte, std::size_t bytes) const override;
  void copy(void* to, const void* from, std::size_t bytes) const override;
  std::function<void()> capture(const std::function<void()>& enqueue) const override;

 private:
  const Pool pool_;
  int device_ = 0;
  cudaStream_t stream_ = nullptr;
};

struct DestroyGraph {
  void operator()(cudaGraph_t graph) const { cudaGraphDestroy(graph); }
};
using Graph = std::unique_ptr<CUgraph_st, DestroyGraph>;
Graph capture_graph(const Stream& stream, const std::function<void()>& enqueue);

// An array in ordinary device memory with a copy of `values`.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const Stream& stream, const std::vector<T>& values)
      : memory_(nullptr, stream, values.size() * sizeof(T)), size_(values.size()) {
    stream.copy(memory_.data(), values.data(), values.size() * sizeof(T));
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::int64_t size() const { return static_cast<std::int64_t>(size_); }

 private:
  Memory memory_;
  std::size_t size_;
};

// Words of pinned memory for one rank of this process; never freed, since that would wait for all
// kernels of the device. `words` at the host's address, the same at the device's.
struct PinnedWords {
  volatile std::uint32_t* host;
  std::uint32_t* device;
};
PinnedWords pinned_words(int rank);  // 16 of them

}  // namespace bench::gpu
