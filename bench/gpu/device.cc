#include "device.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>

namespace bench::gpu {
void ok(cudaError_t error, const char* what) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ", " +
                           cudaGetErrorString(error));
}

int count_devices(std::string* why) {
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
    *why = cudaGetErrorString(error);
    return 0;
  }
  if (count == 0) *why = "no device";
  return count;
}

Stream::Stream(Pool pool) : pool_(pool) {
  ok(cudaGetDevice(&device_), "cudaGetDevice");
  ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::wait(const char* what) const { ok(cudaStreamSynchronize(stream_), what); }

void* Stream::alloc(std::size_t bytes) const {
  const std::size_t size = std::max<std::size_t>(bytes, 16);
  void* data = nullptr;
  if (pool_ == Pool::open) {
    ok(cudaMalloc(&data, size), "cudaMalloc");
  } else {
    ok(cudaMallocAsync(&data, size, stream_), "cudaMallocAsync");
  }
  return data;
}

void Stream::free(void* data, std::size_t /*bytes*/) const {
  if (pool_ == Pool::open) {
    cudaFree(data);
  } else {
    cudaFreeAsync(data, stream_);
  }
}

void Stream::fill(void* data, int byte, std::size_t bytes) const {
  if (bytes != 0) ok(cudaMemsetAsync(data, byte, bytes, stream_), "cudaMemsetAsync");
}

void Stream::copy(void* to, const void* from, std::size_t bytes) const {
  if (bytes == 0) return;
  ok(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_), "cudaMemcpyAsync");
  wait("cudaMemcpyAsync");
}

Graph capture_graph(const Stream& stream, const std::function<void()>& enqueue) {
  cudaGraph_t graph = nullptr;
  ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream, &graph);
    if (graph != nullptr) cudaGraphDestroy(graph);
    throw;
  }
  ok(cudaStreamEndCapture(stream, &graph), "capture");
  return Graph(graph);
}

std::function<void()> Stream::capture(const std::function<void()>& enqueue) const {
  const Graph graph = capture_graph(*this, enqueue);
  cudaGraphExec_t made = nullptr;
  ok(cudaGraphInstantiate(&made, graph.get(), 0), "instantiating a graph");
  const std::shared_ptr<CUgraphExec_st> executable(made, cudaGraphExecDestroy);
  ok(cudaGraphUpload(made, stream_), "uploading a graph");
  wait("uploading a graph");
  return [this, executable] { ok(cudaGraphLaunch(executable.get(), stream_), "cudaGraphLaunch"); };
}

PinnedWords pinned_words(int rank) {
  constexpr std::size_t kWords = 16;
  constexpr std::size_t kRanks = 1024;
  static std::mutex mutex;
  static void* host = nullptr;
  const std::lock_guard lock(mutex);
  if (host == nullptr) {
    ok(cudaHostAlloc(&host, kRanks * kWords * sizeof(std::uint32_t),
                     cudaHostAllocMapped | cudaHostAllocPortable),
       "cudaHostAlloc");
  }
  void* device = nullptr;
  ok(cudaHostGetDevicePointer(&device, host, 0), "cudaHostGetDevicePointer");
  const std::size_t first = static_cast<std::size_t>(rank) * kWords;
  return {static_cast<std::uint32_t*>(host) + first, static_cast<std::uint32_t*>(device) + first};
}

}  // namespace bench::gpu
