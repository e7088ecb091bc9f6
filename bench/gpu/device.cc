#include "device.h"

#include <algorithm>
#include <mutex>
#include <stdexcept>

#include "../ranks.h"

namespace bench::gpu {
namespace {

constexpr std::size_t kRowAlignment = 256;

std::size_t stride_of(DLDataType type, Tensor::Shape shape) {
  const std::size_t bytes = static_cast<std::size_t>(shape.rows * shape.columns) * type.bits / 8;
  return (bytes + kRowAlignment - 1) / kRowAlignment * kRowAlignment;
}

int current_device() {
  int device = 0;
  ok(cudaGetDevice(&device), "cudaGetDevice");
  return device;
}

}  // namespace

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

Stream::Stream() {
  ok(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags");
}

Stream::~Stream() { cudaStreamDestroy(stream_); }

void Stream::wait(const char* what) const { ok(cudaStreamSynchronize(stream_), what); }

Memory::Memory(xd_comm* symmetric_in, const Stream& stream, std::size_t bytes)
    : comm_(symmetric_in), stream_(stream), bytes_(bytes) {
  if (comm_ != nullptr) {
    bench::ok(xd_mem_alloc(comm_, bytes, &data_));
  } else {
    ok(cudaMallocAsync(&data_, std::max<std::size_t>(bytes, 16), stream), "cudaMallocAsync");
  }
  if (bytes != 0) ok(cudaMemsetAsync(data_, 0, bytes, stream), "cudaMemsetAsync");
  stream.wait("zeroing memory");
}

Memory::~Memory() {
  if (comm_ != nullptr) {
    xd_mem_free(comm_, data_);
  } else {
    cudaFreeAsync(data_, stream_);
  }
}

OpenMemory::OpenMemory(std::size_t bytes) {
  ok(cudaMalloc(&data_, std::max<std::size_t>(bytes, 16)), "cudaMalloc");
}

OpenMemory::~OpenMemory() { cudaFree(data_); }

SharedMemory::SharedMemory(xd_comm* comm, const Stream& stream, std::size_t bytes)
    : comm_(comm), memory_(comm, stream, bytes) {
  bench::ok(xd_mem_export(comm_, memory_.data(), &handle_));
}

std::byte* SharedMemory::of(int rank) const {
  xd_mem_handle handle = handle_;
  handle.rank = rank;
  void* data = nullptr;
  bench::ok(xd_mem_import(comm_, &handle, &data));
  return static_cast<std::byte*>(data);
}

std::size_t Tensor::bytes(DLDataType type, Shape shape, int copies) {
  return stride_of(type, shape) * static_cast<std::size_t>(copies);
}

Tensor::Tensor(xd_comm* symmetric_in, const Stream& stream, DLDataType type, Shape shape,
               int copies)
    : memory_(symmetric_in, stream, bytes(type, shape, copies)), shape_{shape.rows, shape.columns} {
  const DLDevice device{kDLCUDA, current_device()};
  for (int copy = 0; copy < copies; ++copy) {
    void* const data = memory_.data() + stride_of(type, shape) * static_cast<std::size_t>(copy);
    tensors_.push_back({data, device, 2, type, shape_, nullptr, 0});
  }
}

void* Tensor::data(int copy) const { return dl(copy)->data; }

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
