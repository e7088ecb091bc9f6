// A stream of the library beside a caller's, and the events that order the two.
#pragma once

#include <cuda_runtime_api.h>

#include <cstddef>
#include <utility>
#include <vector>

#include "cuda/device.h"
#include "cuda/error.h"

namespace xd::gemm::cuda {

// It has the device's highest priority: the small kernels on it go before blocks of a product that
// have not begun. Made with the device current, and for one thread at a time. May be captured: what
// it is given waits for the caller's stream first, and the caller's stream for it last.
class SideStream {
 public:
  explicit SideStream(int device) : device_(device) {
    int least = 0, greatest = 0;
    XD_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
    XD_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking, greatest));
    XD_CUDA_CHECK(cudaEventCreateWithFlags(&ended_, cudaEventDisableTiming));
  }
  ~SideStream() {
    xd::cuda::try_on_device(device_, [this] {
      for (const cudaEvent_t event : events_) cudaEventDestroy(event);
      cudaEventDestroy(ended_);
      cudaStreamDestroy(stream_);
    });
  }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t get() const { return stream_; }
  // Begins an operation: its events may be used again. (A stream that waits for an event has taken
  // note of it when the wait is enqueued.)
  void begin() { used_ = 0; }
  // Work that is enqueued in `later` from here on waits for all that is in `earlier` now.
  void order(cudaStream_t earlier, cudaStream_t later) { wait(record(earlier), later); }
  cudaEvent_t record(cudaStream_t stream) {
    const cudaEvent_t event = next();
    XD_CUDA_CHECK(cudaEventRecord(event, stream));
    return event;
  }
  static void wait(cudaEvent_t event, cudaStream_t stream) {
    XD_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
  }
  // The end of an operation on its caller's stream, and work that comes behind it in another one.
  void mark_end(cudaStream_t stream) {
    XD_CUDA_CHECK(cudaEventRecord(ended_, stream));
    marked_ = true;
  }
  void follow_end(cudaStream_t stream) const {
    if (marked_) wait(ended_, stream);
  }
  // Makes the events of an operation beforehand.
  void reserve(std::size_t events) {
    while (events_.size() < events) make();
  }

 private:
  void make() {
    events_.reserve(events_.size() + 1);
    cudaEvent_t event = nullptr;
    XD_CUDA_CHECK(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
    events_.push_back(event);
  }
  cudaEvent_t next() {
    reserve(used_ + 1);
    return events_[used_++];
  }

  const int device_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t ended_ = nullptr;
  bool marked_ = false;
  std::vector<cudaEvent_t> events_;
  std::size_t used_ = 0;
};

}  // namespace xd::gemm::cuda
