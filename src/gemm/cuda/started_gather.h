// A gather in progress on the context's stream, and the streams that must wait for it.
//
//   callers' streams             the context's stream
//   start_all_gather ──────────► open, copies, landed, close
//   ..                                    │
//   wait (any stream) ◄───────────────────┤   may be called, by several streams
//   the next operation ◄──────────────────┘   always: its stream need not be that of the wait
//
// Streams are ordered by events, and no event goes into a capture or out of one. So a gather that
// was begun in a capture ends in it, and one that was begun outside has been waited for outside
// when an operation is captured. The captured operation is ordered behind it by whoever launches
// the graph.
//
// A capture that never becomes a graph holds nothing: a gather that was begun there has not been,
// and one that was begun outside has an event of its own.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/side_stream.h"
#include "cuda/stream.h"

namespace xd::gemm::cuda {

using xd::cuda::SideStream;

// Its functions are called with the device current.
class StartedGather {
 public:
  explicit StartedGather(int device) : outside_(device), inside_(device) {}

  // True until a stream has been ordered behind it.
  bool under_way() const { return under_way_; }
  // True if a stream that waits has something to wait for.
  bool can_be_waited_for() const { return tail_ || capture_ != 0; }

  // The reason why a call on `caller` must not be made now, since its order with the work on `side`
  // cannot be established; nullptr = it may be made. Nothing has been enqueued then.
  const char* obstacle(cudaStream_t caller, SideStream& side) {
    if (!xd::cuda::takes_work(caller)) return nullptr;  // the call says so itself
    side.leave_invalidated_capture();
    const std::uint64_t here = xd::cuda::capture_of(caller);
    const std::uint64_t there = xd::cuda::capture_of(side.get());
    if (there != 0 && there != here) {
      return "the context is part of a capture that has not ended, expected a stream of that "
             "capture";
    }
    if (capture_ != 0 &&
        capture_ != there) {  // it has ended: without a graph, if the gather had not
      capture_ = 0;
      under_way_ = false;
    }
    if (under_way_ && capture_ != here) {
      return "a gather that was begun outside the capture is under way, expected xd_gemm_wait "
             "before the capture";
    }
    return nullptr;
  }

  // It has been enqueued on `side`, by a call on `caller`.
  void begin(cudaStream_t caller, const SideStream& side) {
    const std::uint64_t here = xd::cuda::capture_of(caller);
    XD_CUDA_CHECK(cudaEventRecord((here == 0 ? outside_ : inside_).get(), side.get()));
    under_way_ = true;
    capture_ = here;
    if (here == 0) tail_ = true;
  }
  // Orders `caller` behind it. Called where there is no obstacle.
  void wait(cudaStream_t caller) {
    const std::uint64_t here = xd::cuda::capture_of(caller);
    if (here != 0 ? capture_ != here : !tail_) return;
    SideStream::wait((here == 0 ? outside_ : inside_).get(), caller);
    under_way_ = false;
  }
  // Likewise, for an operation: the one after it finds nothing to be ordered behind.
  void join(cudaStream_t caller) {
    wait(caller);
    if (!xd::cuda::is_captured(caller)) {
      tail_ = false;
    } else {
      capture_ = 0;
    }
  }

  // False if one that was begun outside captures has not ended by the deadline.
  bool comes_to_rest(const Deadline& deadline) const {
    return SideStream::has_come(outside_.get(), deadline);
  }

 private:
  const xd::cuda::Event outside_, inside_;  // its end, outside captures and in one
  bool under_way_ = false;
  bool tail_ = false;  // outside captures, no operation has been ordered behind the last one
  std::uint64_t capture_ = 0;  // in which one was begun that no operation has been ordered behind
};

}  // namespace xd::gemm::cuda
