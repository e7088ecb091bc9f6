// The ranks of these examples, and the memory of the device that a rank computes on: a GPU, if the
// program was built with WITH_CUDA and is called with the argument `cuda`, else the CPU.
#pragma once

#include <crossdock/crossdock.h>

#include <cstdlib>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

#ifdef WITH_CUDA
#include <cuda_runtime_api.h>
#else
typedef struct CUstream_st* cudaStream_t;
#endif

inline void check(xd_status status) {
  if (status != XD_SUCCESS) throw std::runtime_error(xd_last_error());
}

class Device {
 public:
  // Joins the ranks that were started together.
  Device(int argc, char** argv) : is_cuda_(argc > 1 && std::string(argv[1]) == "cuda") {
    xd_comm_config config = XD_COMM_CONFIG_INIT;
    config.bootstrap = XD_BOOTSTRAP_ENVIRONMENT;
    if (is_cuda_) config.device = {kDLCUDA, -1};
    check(xd_comm_create(&config, &comm));
    xd_comm_info info = XD_COMM_INFO_INIT;
    check(xd_comm_get_info(comm, &info));
    rank = info.rank;
    num_ranks = info.num_ranks;
#ifdef WITH_CUDA
    if (is_cuda_) {
      require(cudaSetDevice(info.device.device_id));
      require(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    }
#else
    if (is_cuda_) throw std::runtime_error("this program was built without CUDA");
#endif
  }
  ~Device() {
    for (void* const memory : memories_) release(memory);
    xd_comm_destroy(comm);
  }
  Device(const Device&) = delete;
  Device& operator=(const Device&) = delete;

  // A multiple of 16. It lives as long as this object.
  void* allocate(std::size_t bytes) {
    void* memory = nullptr;
#ifdef WITH_CUDA
    if (is_cuda_) require(cudaMalloc(&memory, bytes + 16));
#endif
    if (!is_cuda_) memory = std::aligned_alloc(64, (bytes / 64 + 1) * 64);
    if (memory == nullptr) throw std::bad_alloc();
    memories_.push_back(memory);
    return memory;
  }

  template <class T>
  void* upload(const std::vector<T>& values) {
    void* const memory = allocate(values.size() * sizeof(T));
    copy(memory, values.data(), values.size() * sizeof(T));
    return memory;
  }

  template <class T>
  std::vector<T> download(const void* memory, std::size_t count) {
    std::vector<T> values(count);
    copy(values.data(), memory, count * sizeof(T));
    return values;
  }

  xd_comm* comm = nullptr;
  int rank = 0, num_ranks = 1;
  cudaStream_t stream = nullptr;

 private:
  // In the order of the stream; it has ended on return.
  void copy(void* to, const void* from, std::size_t bytes) {
#ifdef WITH_CUDA
    if (is_cuda_) {
      require(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream));
      require(cudaStreamSynchronize(stream));
    }
#endif
    if (!is_cuda_ && bytes > 0) std::memcpy(to, from, bytes);
  }

  void release(void* memory) {
#ifdef WITH_CUDA
    if (is_cuda_) cudaFree(memory);
#endif
    if (!is_cuda_) std::free(memory);
  }

#ifdef WITH_CUDA
  static void require(cudaError_t error) {
    if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
  }
#endif

  bool is_cuda_;
  std::vector<void*> memories_;
};
