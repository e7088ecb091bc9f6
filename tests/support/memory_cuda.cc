// Several ranks may share a device, and a kernel of one rank may be waiting for another rank, which
// is about to call a function here. So nothing here waits for the device: no default stream, no
// cudaFree, no kernel that would have to be loaded first. Device memory, pinned memory and streams
// are kept for the next user and go with the process.
#include "support/memory_cuda.h"

#include <crossdock/version.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <bit>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <unordered_map>
#include <utility>
#include <vector>

namespace xd::test {
namespace {

void check(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

constexpr std::size_t kStagingBytes = std::size_t{1} << 20;

struct Lane {
  cudaStream_t stream = nullptr;
  std::byte* staging = nullptr;  // pinned
};

void check(CUresult error, const char* call) {
  if (error == CUDA_SUCCESS) return;
  throw std::runtime_error(std::string(call) + ": error " + std::to_string(error));
}

template <class Function>
Function driver(const char* name, unsigned version) {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult result{};
  check(cudaGetDriverEntryPointByVersion(name, &function, version, cudaEnableDefault, &result),
        name);
  return reinterpret_cast<Function>(function);
}

enum class Source { malloc, virtual_memory };

void* malloc_chunk(std::size_t bytes) {
  void* chunk = nullptr;
  check(cudaMalloc(&chunk, bytes), "cudaMalloc");
  return chunk;
}

// Maps memory as XLA does: shareable, and accessible from its own device alone.
void* map_chunk(int device, std::size_t bytes) {
  const CUmemLocation where{.type = CU_MEM_LOCATION_TYPE_DEVICE, .id = device};
  CUmemAllocationProp properties{};
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = where;
  properties.requestedHandleTypes = CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
  CUmemGenericAllocationHandle handle = 0;
  check(driver<PFN_cuMemCreate_v10020>("cuMemCreate", 10020)(&handle, bytes, &properties, 0),
        "cuMemCreate");
  CUdeviceptr base = 0;
  check(driver<PFN_cuMemAddressReserve_v10020>("cuMemAddressReserve", 10020)(&base, bytes, 0, 0, 0),
        "cuMemAddressReserve");
  check(driver<PFN_cuMemMap_v10020>("cuMemMap", 10020)(base, bytes, 0, handle, 0), "cuMemMap");
  const CUmemAccessDesc access{.location = where, .flags = CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  check(driver<PFN_cuMemSetAccess_v10020>("cuMemSetAccess", 10020)(base, bytes, &access, 1),
        "cuMemSetAccess");
  return reinterpret_cast<void*>(base);  // NOLINT(performance-no-int-to-ptr)
}

class Device {
 public:
  Device(int ordinal, Source source) : ordinal_(ordinal), source_(source) {}
  int ordinal() const { return ordinal_; }
  // Makes the device current for the calling thread.
  void select() const { check(cudaSetDevice(ordinal_), "cudaSetDevice"); }

  void* allocate(std::size_t bytes) {
    const std::lock_guard lock(mutex_);
    const std::size_t size = std::bit_ceil(std::max<std::size_t>(bytes, 256));
    std::vector<std::byte*>& free = free_[size];
    if (free.empty()) free.push_back(carve(size));
    std::byte* const ptr = free.back();
    free.pop_back();
    sizes_[ptr] = size;
    return ptr;
  }

  void release(void* ptr) {
    const std::lock_guard lock(mutex_);
    auto* const start = static_cast<std::byte*>(ptr);
    free_[sizes_.at(start)].push_back(start);
  }

  Lane take_lane() {
    const std::lock_guard lock(mutex_);
    if (lanes_.empty()) lanes_.push_back(make_lane());
    const Lane lane = lanes_.back();
    lanes_.pop_back();
    return lane;
  }

  void put_lane(const Lane& lane) {
    const std::lock_guard lock(mutex_);
    lanes_.push_back(lane);
  }

 private:
  std::byte* carve(std::size_t size) {
    constexpr std::size_t kChunk = std::size_t{64} << 20;
    if (size > chunk_left_) {
      chunk_left_ = std::max(size, kChunk);
      void* const chunk =
          source_ == Source::malloc ? malloc_chunk(chunk_left_) : map_chunk(ordinal_, chunk_left_);
      chunk_ = static_cast<std::byte*>(chunk);
    }
    std::byte* const result = chunk_;
    chunk_ += size;
    chunk_left_ -= size;
    return result;
  }

  static Lane make_lane() {
    Lane lane;
    check(cudaStreamCreateWithFlags(&lane.stream, cudaStreamNonBlocking), "cudaStreamCreate");
    void* staging = nullptr;
    check(cudaHostAlloc(&staging, kStagingBytes, cudaHostAllocDefault), "cudaHostAlloc");
    lane.staging = static_cast<std::byte*>(staging);
    return lane;
  }

  const int ordinal_;
  const Source source_;
  std::mutex mutex_;
  std::byte* chunk_ = nullptr;
  std::size_t chunk_left_ = 0;
  std::map<std::size_t, std::vector<std::byte*>> free_;
  std::unordered_map<std::byte*, std::size_t> sizes_;
  std::vector<Lane> lanes_;
};

// Devices are never destroyed, since the driver may be gone by then.
Device& device(int ordinal, Source source) {
  static std::mutex mutex;
  static auto* const devices = new std::map<std::pair<int, Source>, Device>;
  const std::lock_guard lock(mutex);
  return devices->try_emplace({ordinal, source}, ordinal, source).first->second;
}

class CudaMemory final : public Memory {
 public:
  explicit CudaMemory(Device& device) : device_(device) {
    device_.select();
    lane_ = device_.take_lane();
  }
  ~CudaMemory() override { device_.put_lane(lane_); }

  DLDevice device() const override { return {kDLCUDA, device_.ordinal()}; }
  xd_stream stream() const override { return lane_.stream; }

  void* allocate(std::size_t bytes) override {
    device_.select();
    return device_.allocate(bytes);
  }
  void release(void* ptr) override { device_.release(ptr); }

  void copy_in(void* to, const void* host, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    device_.select();
    for (std::size_t at = 0; at < bytes; at += kStagingBytes) {
      const std::size_t size = std::min(kStagingBytes, bytes - at);
      std::memcpy(lane_.staging, static_cast<const std::byte*>(host) + at, size);
      check(cudaMemcpyAsync(static_cast<std::byte*>(to) + at, lane_.staging, size,
                            cudaMemcpyHostToDevice, lane_.stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(lane_.stream), "cudaStreamSynchronize");
    }
  }

  void copy_out(void* host, const void* from, std::size_t bytes) override {
    const std::lock_guard lock(mutex_);
    device_.select();
    for (std::size_t at = 0; at < bytes; at += kStagingBytes) {
      const std::size_t size = std::min(kStagingBytes, bytes - at);
      check(cudaMemcpyAsync(lane_.staging, static_cast<const std::byte*>(from) + at, size,
                            cudaMemcpyDeviceToHost, lane_.stream),
            "cudaMemcpyAsync");
      check(cudaStreamSynchronize(lane_.stream), "cudaStreamSynchronize");
      std::memcpy(static_cast<std::byte*>(host) + at, lane_.staging, size);
    }
  }

  void synchronize() override {
    device_.select();
    check(cudaStreamSynchronize(lane_.stream), "cudaStreamSynchronize");
  }

  std::unique_ptr<Memory> another_stream() const override {
    return std::make_unique<CudaMemory>(device_);
  }
  std::unique_ptr<Memory> of_virtual_memory() const override {
    return std::make_unique<CudaMemory>(test::device(device_.ordinal(), Source::virtual_memory));
  }

  std::size_t device_bytes_used() const override {
    device_.select();
    std::size_t free = 0, total = 0;
    check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    return total - free;
  }

 private:
  Device& device_;
  Lane lane_;
  std::mutex mutex_;  // guards the staging
};

}  // namespace

int cuda_device_count() {
  // This has to happen before the driver starts. Streams that share a queue of the device wait for
  // one another; and kernels that are loaded late, which is the default of new drivers only, are
  // the harder case.
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  ::setenv("CUDA_MODULE_LOADING", "LAZY", 0);
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess || count == 0) {
    throw Unavailable(std::string("no CUDA device: ") + cudaGetErrorString(error));
  }
  const char* reason = nullptr;
  if (!xd_feature_available(XD_FEATURE_CUDA, &reason)) {
    throw std::runtime_error(std::string("a CUDA device, but no CUDA executor: ") + reason);
  }
  return count;
}

std::unique_ptr<Memory> make_cuda_memory(int rank) {
  return std::make_unique<CudaMemory>(device(rank % cuda_device_count(), Source::malloc));
}

}  // namespace xd::test
