// A stream of the library beside a caller's, and the events that order them.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <thread>
#include <vector>

#include "base/deadline.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/stream.h"

namespace xd::cuda {

// With the highest priority, the small kernels on it go before blocks of a product that have not
// begun. Made with the device current, and for one thread at a time. May be captured: what
// it is given waits for the caller's stream first, and the caller's stream for it last, or that of
// xd_gemm_wait.
//
// At its end the stream goes back to the pool of the device's streams. Where ranks are threads that
// share a device, a stream that is made anew for each context may get a hardware queue in which
// another rank's opening waits for this rank's.
class SideStream {
 public:
  explicit SideStream(int device, Priority priority = Priority::highest)
      : device_(device), priority_(priority), ended_(device) {
    stream_ = another();
  }
  // A stream that is still part of a capture does not go back to the pool.
  ~SideStream() {
    try_on_device(device_, [this] {
      for (Stream& stream : all_) {
        if (!is_captured(stream.get())) continue;
        cudaStreamDestroy(stream.get());
        stream.abandon();
      }
    });
  }
  SideStream(const SideStream&) = delete;
  SideStream& operator=(const SideStream&) = delete;

  cudaStream_t get() const { return stream_; }
  // A capture that was invalidated keeps its streams until it is ended, and that may be never. So
  // another stream takes the place of one that is part of such a capture. Nothing that runs is left
  // behind there but what its user finds by events.
  void leave_invalidated_capture() {
    if (takes_work(stream_)) return;
    take_another(takes_work);
  }
  // The same for a stream that is part of any other capture than the one of `caller`, if that is
  // captured: a wait there would take the other capture down.
  void leave_other_captures(cudaStream_t caller) {
    const std::uint64_t own = capture_of(caller);
    const auto fits = [own](cudaStream_t stream) {
      const std::uint64_t capture = capture_of(stream);
      return capture == 0 || capture == own;
    };
    if (!fits(stream_)) take_another(fits);
  }
  // Begins an operation: its events may be used again. (A stream that waits for an event has taken
  // note of it when the wait is enqueued.)
  void begin() { used_ = 0; }
  // Work that is enqueued in `later` from here on waits for all that is in `earlier` now.
  void order(cudaStream_t earlier, cudaStream_t later) { wait(record(earlier), later); }
  cudaEvent_t record(cudaStream_t stream) {
    reserve(used_ + 1);
    const cudaEvent_t event = events_[used_++].get();
    XD_CUDA_CHECK(cudaEventRecord(event, stream));
    return event;
  }
  static void wait(cudaEvent_t event, cudaStream_t stream) {
    XD_CUDA_CHECK(cudaStreamWaitEvent(stream, event, 0));
  }
  // The end of an operation on its caller's stream, and work that comes behind it in another one.
  void mark_end(cudaStream_t stream) {
    XD_CUDA_CHECK(cudaEventRecord(ended_.get(), stream));
    marked_ = true;
  }
  void follow_end(cudaStream_t stream) const {
    if (marked_) wait(ended_.get(), stream);
  }
  // Waits until the marked end has come and its streams have nothing to do; false if that is not so
  // by the deadline. Graphs that run are not seen. It needs nothing that it may not get.
  bool comes_to_rest(const Deadline& deadline) const noexcept {
    for (const Stream& one : all_) {
      // While a stream is captured, nothing else is enqueued there.
      const cudaStream_t stream = one.get();
      if (is_captured(stream)) continue;
      if (!is_ready([stream] { return cudaStreamQuery(stream); }, deadline)) return false;
    }
    return !marked_ || has_come(ended_.get(), deadline);
  }
  // False if an event has not come by the deadline.
  static bool has_come(cudaEvent_t event, const Deadline& deadline) noexcept {
    return is_ready([event] { return cudaEventQuery(event); }, deadline);
  }
  // Makes the events of an operation beforehand.
  void reserve(std::size_t events) {
    events_.reserve(events);
    while (events_.size() < events) events_.emplace_back(device_);
  }

 private:
  // An error of the device ends everything.
  template <class Query>
  static bool is_ready(Query&& query, const Deadline& deadline) noexcept {
    while (query() == cudaErrorNotReady) {
      cudaGetLastError();  // not an error, but recorded as one
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    return true;
  }
  template <class Fits>
  void take_another(Fits&& fits) {
    const auto found =
        std::ranges::find_if(all_, [&fits](const Stream& one) { return fits(one.get()); });
    stream_ = found != all_.end() ? found->get() : another();
  }
  cudaStream_t another() { return all_.emplace_back(device_, priority_).get(); }

  const int device_;
  const Priority priority_;
  const Event ended_;
  cudaStream_t stream_ = nullptr;
  std::vector<Stream> all_;
  bool marked_ = false;
  std::vector<Event> events_;
  std::size_t used_ = 0;
};

}  // namespace xd::cuda
