// The benchmark's use of CUDA: checked calls, memory that is never freed behind a running kernel,
// memory that all ranks can address.
#pragma once

#include <crossdock/crossdock.h>
#include <cuda_runtime_api.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace bench::gpu {

// Throws std::runtime_error naming `what` and CUDA's reason.
void ok(cudaError_t error, const char* what);

// The number of devices; 0 without a driver, with the reason in *why.
int count_devices(std::string* why);

// A non-blocking stream: the legacy default stream would make ranks that share a device wait for
// each other.
class Stream {
 public:
  Stream();
  ~Stream();
  Stream(const Stream&) = delete;
  Stream& operator=(const Stream&) = delete;
  operator cudaStream_t() const { return stream_; }
  void wait(const char* what) const;

 private:
  cudaStream_t stream_ = nullptr;
};

// Zeroed device memory: symmetric or, without a communicator, ordinary.
class Memory {
 public:
  Memory(xd_comm* symmetric_in, const Stream& stream, std::size_t bytes);
  ~Memory();
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }
  std::size_t bytes() const { return bytes_; }

 private:
  xd_comm* comm_;
  const Stream& stream_;
  std::size_t bytes_;
  void* data_ = nullptr;
};

// Memory of the current device that may be opened to other devices, as NCCL does: it reads a peer's
// memory in place where both ranks are in one process, and memory of a stream's pool is closed.
class OpenMemory {
 public:
  explicit OpenMemory(std::size_t bytes);
  ~OpenMemory();
  OpenMemory(const OpenMemory&) = delete;
  OpenMemory& operator=(const OpenMemory&) = delete;
  std::byte* data() const { return static_cast<std::byte*>(data_); }

 private:
  void* data_ = nullptr;
};

// An array in ordinary device memory with a copy of `values`.
template <class T>
class DeviceArray {
 public:
  DeviceArray(const Stream& stream, const std::vector<T>& values)
      : memory_(nullptr, stream, values.size() * sizeof(T)), size_(values.size()) {
    ok(cudaMemcpyAsync(memory_.data(), values.data(), values.size() * sizeof(T),
                       cudaMemcpyHostToDevice, stream),
       "copy to the device");
    stream.wait("copy to the device");  // the values may go away
  }
  T* data() const { return reinterpret_cast<T*>(memory_.data()); }
  std::int64_t size() const { return static_cast<std::int64_t>(size_); }

 private:
  Memory memory_;
  std::size_t size_;
};

// Symmetric memory of equal size on every rank. All ranks make theirs in the same order, before any
// other allocation, so that the handles differ in the rank only. Peers may use it after a barrier.
class SharedMemory {
 public:
  SharedMemory(xd_comm* comm, const Stream& stream, std::size_t bytes);
  std::byte* of(int rank) const;

 private:
  xd_comm* comm_;
  Memory memory_;
  xd_mem_handle handle_{};
};

// Some copies of a matrix, one behind another, so that an iteration finds nothing in the cache that
// the last one has left.
class Tensor {
 public:
  struct Shape {
    std::int64_t rows, columns;
  };
  Tensor(xd_comm* symmetric_in, const Stream& stream, DLDataType type, Shape shape, int copies = 1);

  static std::size_t bytes(DLDataType type, Shape shape, int copies);
  void* data(int copy = 0) const;
  const DLTensor* dl(int copy = 0) const { return &tensors_[index(copy)]; }
  int copies() const { return static_cast<int>(tensors_.size()); }
  std::int64_t rows() const { return shape_[0]; }

 private:
  std::size_t index(int copy) const { return static_cast<std::size_t>(copy) % tensors_.size(); }

  Memory memory_;
  std::int64_t shape_[2];
  std::vector<DLTensor> tensors_;
};

// Words of pinned memory for one rank of this process; never freed, since that would wait for all
// kernels of the device. `words` at the host's address, the same at the device's.
struct PinnedWords {
  volatile std::uint32_t* host;
  std::uint32_t* device;
};
PinnedWords pinned_words(int rank);  // 16 of them

}  // namespace bench::gpu
