// A stream of the library's own: it waits for no other stream, and the legacy default stream does
// not wait for it. And what streams of callers are like.
#pragma once

#include <cuda_runtime_api.h>

#include <utility>

#include "cuda/device.h"
#include "cuda/error.h"

namespace xd::cuda {

class Stream {
 public:
  Stream() = default;
  explicit Stream(int device) : device_(device) {
    const DeviceGuard guard(device);
    XD_CUDA_CHECK(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
  }
  ~Stream() {
    if (stream_ != nullptr) try_on_device(device_, [this] { cudaStreamDestroy(stream_); });
  }
  Stream(Stream&& other) noexcept
      : device_(other.device_), stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(stream_, other.stream_);
    return *this;
  }

  int device() const { return device_; }
  cudaStream_t get() const { return stream_; }
  void synchronize() const {
    const DeviceGuard guard(device_);
    XD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }

 private:
  int device_ = -1;
  cudaStream_t stream_ = nullptr;
};

// The device's context is current for both, and both may be asked of a stream that is captured.

// False for a stream whose capture has been invalidated, and for the legacy default stream while a
// blocking stream is captured: nothing can be enqueued there.
bool takes_work(cudaStream_t stream);

// Multiprocessors that kernels of a stream run on, if its green context has fewer than `all`, those
// of the device. (A driver that knows no green contexts has none.)
int multiprocessors_of(cudaStream_t stream, int all);

}  // namespace xd::cuda
