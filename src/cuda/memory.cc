#include "cuda/memory.h"

#include <algorithm>
#include <bit>
#include <chrono>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "base/error.h"
#include "cuda/stream.h"

namespace xd::cuda {
namespace {

// Blocks of powers of two, cut from pages and kept for the next request.
class PinnedPool {
 public:
  // The pool is never destroyed, since other static destructors may drop blocks.
  static PinnedPool& instance() {
    static PinnedPool& pool = *new PinnedPool;
    return pool;
  }

  static std::size_t block_bytes(std::size_t bytes) {
    return std::bit_ceil(std::max(bytes, kSmallest));
  }

  std::byte* take(int device, std::size_t bytes) {
    const std::size_t size = block_bytes(bytes);
    const std::lock_guard lock(mutex_);
    std::vector<std::byte*>& free = free_[size];
    if (free.empty()) add_page(device, size, free);
    std::byte* const block = free.back();
    free.pop_back();
    std::memset(block, 0, size);
    return block;
  }

  void give_back(std::byte* block, std::size_t bytes) noexcept {
    const std::lock_guard lock(mutex_);
    free_[block_bytes(bytes)].push_back(block);  // has room, thanks to add_page
  }

 private:
  static constexpr std::size_t kSmallest = 256;  // two cache lines, so that no block shares one
  static constexpr std::size_t kPage = std::size_t{64} << 10;

  void add_page(int device, std::size_t size, std::vector<std::byte*>& free) {
    const DeviceGuard guard(device);
    const std::size_t bytes = std::max(size, kPage);
    blocks_[size] += bytes / size;
    free.reserve(blocks_[size]);
    void* page = nullptr;
    XD_CUDA_CHECK(cudaHostAlloc(&page, bytes, cudaHostAllocPortable | cudaHostAllocMapped));
    for (std::size_t at = 0; at < bytes; at += size) {
      free.push_back(static_cast<std::byte*>(page) + at);
    }
  }

  std::mutex mutex_;
  std::map<std::size_t, std::vector<std::byte*>> free_;  // free blocks, by size
  std::map<std::size_t, std::size_t> blocks_;            // number of all blocks, by size
};

}  // namespace

DeviceBuffer::DeviceBuffer(int device, std::size_t bytes, const char* what)
    : device_(device), bytes_(bytes) {
  if (bytes == 0) return;
  const DeviceGuard guard(device);
  const Stream stream(device);
  void* data = nullptr;
  const cudaError_t error = cudaMallocAsync(&data, bytes, stream.get());
  if (error == cudaErrorMemoryAllocation) {
    cudaGetLastError();
    std::size_t available = 0, total = 0;
    cudaMemGetInfo(&available, &total);
    fail(XD_ERROR_OUT_OF_MEMORY, what, ": asked ", bytes, " bytes of ", describe_device(device),
         ", available ", available);
  }
  check(error, "cudaMallocAsync");
  data_ = static_cast<std::byte*>(data);
  const cudaError_t zeroed = cudaMemsetAsync(data, 0, bytes, stream.get());
  const cudaError_t done = cudaStreamSynchronize(stream.get());
  if (zeroed != cudaSuccess || done != cudaSuccess) {
    cudaFreeAsync(data, stream.get());
    check(zeroed, "cudaMemsetAsync");
    check(done, "cudaStreamSynchronize");
  }
}

DeviceBuffer::~DeviceBuffer() {
  if (data_ == nullptr) return;
  try_on_device(device_, [this] {
    const Stream stream(device_);
    cudaFreeAsync(data_, stream.get());
    cudaStreamSynchronize(stream.get());
  });
}

void DeviceBuffer::write(std::size_t offset, const void* from, std::size_t bytes) const {
  XD_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  const DeviceGuard guard(device_);
  const Stream stream(device_);
  XD_CUDA_CHECK(cudaMemcpyAsync(data_ + offset, from, bytes, cudaMemcpyHostToDevice, stream.get()));
  XD_CUDA_CHECK(cudaStreamSynchronize(stream.get()));
}

bool DeviceBuffer::read(std::size_t offset, void* pinned, std::size_t bytes,
                        Deadline deadline) const {
  XD_CHECK(offset <= bytes_ && bytes <= bytes_ - offset);
  const DeviceGuard guard(device_);
  Stream stream(device_);
  XD_CUDA_CHECK(
      cudaMemcpyAsync(pinned, data_ + offset, bytes, cudaMemcpyDeviceToHost, stream.get()));
  for (;;) {
    const cudaError_t state = cudaStreamQuery(stream.get());
    if (state == cudaSuccess) return true;
    if (state != cudaErrorNotReady) fail_cuda("cudaStreamQuery", state);
    cudaGetLastError();
    if (deadline.passed()) {
      stream.abandon();
      return false;
    }
    std::this_thread::sleep_for(std::chrono::microseconds(20));
  }
}

PinnedBlock::PinnedBlock(int device, std::size_t bytes)
    : data_(PinnedPool::instance().take(device, bytes)), bytes_(bytes) {}

PinnedBlock::~PinnedBlock() {
  if (data_ != nullptr) PinnedPool::instance().give_back(data_, bytes_);
}

}  // namespace xd::cuda
