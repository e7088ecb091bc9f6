// Streams of the library, and questions about streams of callers.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <utility>

#include "cuda/device.h"
#include "cuda/error.h"

namespace xd::cuda {

// Blocks of streams of the highest priority go before blocks of others that have not begun.
enum class Priority : std::uint8_t { usual, highest };

// A stream of the library, for work that its user waits for. It waits for no other stream, and the
// legacy default stream does not wait for it.
//
// The stream comes from a pool and goes back to it: a device has few hardware queues, which its
// streams share, and work behind a caller's kernel in one queue waits for that kernel. So the
// library makes no more streams than are used at a time.
class Stream {
 public:
  Stream() = default;
  explicit Stream(int device, Priority priority = Priority::usual);
  ~Stream() { give_back(); }
  Stream(Stream&& other) noexcept
      : device_(other.device_),
        priority_(other.priority_),
        stream_(std::exchange(other.stream_, nullptr)) {}
  Stream& operator=(Stream&& other) noexcept {
    std::swap(device_, other.device_);
    std::swap(priority_, other.priority_);
    std::swap(stream_, other.stream_);
    return *this;
  }

  int device() const { return device_; }
  cudaStream_t get() const { return stream_; }
  void synchronize() const {
    const DeviceGuard guard(device_);
    XD_CUDA_CHECK(cudaStreamSynchronize(stream_));
  }
  // Keeps the stream out of the pool for ever, because work on it does not end.
  void abandon() { stream_ = nullptr; }

 private:
  void give_back() noexcept;

  int device_ = -1;
  Priority priority_ = Priority::usual;
  cudaStream_t stream_ = nullptr;
};

// An event, destroyed with the object.
class Event {
 public:
  // Called with the device current.
  explicit Event(int device, unsigned flags = cudaEventDisableTiming) : device_(device) {
    XD_CUDA_CHECK(cudaEventCreateWithFlags(&event_, flags));
  }
  ~Event() {
    if (event_ != nullptr) try_on_device(device_, [this] { cudaEventDestroy(event_); });
  }
  Event(Event&& other) noexcept
      : device_(other.device_), event_(std::exchange(other.event_, nullptr)) {}
  Event& operator=(Event&&) = delete;

  cudaEvent_t get() const { return event_; }

 private:
  int device_;
  cudaEvent_t event_ = nullptr;
};

// The device's context must be current for these functions. They may be asked about a stream that
// is captured.

// True while a stream is captured.
bool is_captured(cudaStream_t stream);

// Tells captures apart. 0 = the stream is not captured; another number for all captures that have
// been invalidated and not yet ended.
std::uint64_t capture_of(cudaStream_t stream);

// True for NULL and its other name.
inline bool is_legacy_stream(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy;
}

// False for a stream whose capture has been invalidated, and for the legacy default stream while a
// blocking stream is captured: nothing can be enqueued there.
bool takes_work(cudaStream_t stream);

// True for a stream of a green context, which is not the device's own.
bool is_of_green_context(cudaStream_t stream);

// The number of multiprocessors that kernels of a stream run on: those of its green context, if
// that has fewer than `all`, the device's. (A driver that knows no green contexts has none.)
int multiprocessors_of(cudaStream_t stream, int all);

}  // namespace xd::cuda
