// When a sequence's operations run on their device, for the trace. Two events go beside each
// operation, and the host reads them later, without ever waiting: when it enqueues further ones.
// Left out are operations that are captured, whose events would be a graph's, and those for which
// all events are in use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/stream.h"
#include "observe/device_clock.h"
#include "observe/subject.h"

namespace xd::turn {

class DeviceTimes {
 public:
  // Adds a line for the device to the subject's trace. Called with the device current.
  DeviceTimes(int device, observe::Subject& subject) : subject_(subject) {
    subject_.add_device_line();
    pairs_.reserve(kPairs);
    for (std::size_t i = 0; i < kPairs; ++i) {
      pairs_.push_back(
          {xd::cuda::Event(device, cudaEventDefault), xd::cuda::Event(device, cudaEventDefault)});
    }
  }

  // Called with the device current, before and after an operation is enqueued on a stream that
  // takes work; the second only if that has succeeded. By one thread at a time, as operations are.
  void begin(cudaStream_t stream) {
    collect();
    open_ = marked_ - read_ < kPairs - 1 && !xd::cuda::is_captured(stream);
    if (!open_) return;
    next().enqueued_ns = observe::now_ns();
    open_ = record(next().begin, stream);
  }
  void end(std::int32_t operation, cudaStream_t stream) {
    if (!open_) return;
    next().operation = operation;
    if (record(next().end, stream)) ++marked_;
  }
  // Writes the operations that have ended into the trace.
  void collect() {
    for (; read_ < marked_; ++read_) {
      if (!succeeds(cudaEventQuery(at(read_).end.get()))) return;
      write(at(read_));
    }
  }

 private:
  static constexpr std::size_t kPairs = 256;  // more than a queue of launches holds, of most jobs

  struct Pair {
    xd::cuda::Event begin, end;
    std::uint64_t enqueued_ns = 0;
    std::int32_t operation = 0;
  };

  Pair& at(std::uint64_t number) { return pairs_[number % kPairs]; }
  Pair& next() { return at(marked_); }
  // Clears the runtime's record of an error, which is not the caller's.
  static bool succeeds(cudaError_t result) {
    if (result == cudaSuccess) return true;
    static_cast<void>(cudaGetLastError());
    return false;
  }
  static bool record(const xd::cuda::Event& event, cudaStream_t stream) {
    return succeeds(cudaEventRecord(event.get(), stream));
  }
  static std::uint64_t between(const xd::cuda::Event& from, const xd::cuda::Event& to) {
    float milliseconds = 0;
    if (!succeeds(cudaEventElapsedTime(&milliseconds, from.get(), to.get()))) return 0;
    return milliseconds > 0 ? static_cast<std::uint64_t>(1e6 * double{milliseconds}) : 0;
  }
  void write(const Pair& pair) {
    // The pair before is the last one whose events are used again: see begin().
    const std::uint64_t pause = read_ > 0 ? between(at(read_ - 1).end, pair.begin) : 0;
    const auto place =
        clock_.place(pair.enqueued_ns, pause, between(pair.begin, pair.end), observe::now_ns());
    subject_.device_track().span(subject_.operations().name(pair.operation), place.begin_ns,
                                 place.end_ns, nullptr);
  }

  observe::Subject& subject_;
  observe::DeviceClock clock_;
  std::vector<Pair> pairs_;
  std::uint64_t marked_ = 0, read_ = 0;  // operations with both events; of these, in the trace
  bool open_ = false;
};

}  // namespace xd::turn
