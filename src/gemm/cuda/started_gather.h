// The gather that a context has begun on its own stream, and who comes behind it.
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
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cuda/stream.h"
#include "gemm/cuda/side_stream.h"

namespace xd::gemm::cuda {

// Its functions are called with the device current.
class StartedGather {
 public:
  // True until a stream has been ordered behind it.
  bool under_way() const { return under_way_; }

  // The reason why a call on `caller` must not be made now, since its order with the work on `side`
  // cannot be established; nullptr = it may be made. Nothing has been enqueued then.
  const char* obstacle(cudaStream_t caller, const SideStream& side) {
    if (!xd::cuda::takes_work(caller)) return nullptr;  // the call says so itself
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

  // It has been enqueued, by a call on `caller`.
  void begin(cudaStream_t caller) {
    under_way_ = true;
    capture_ = xd::cuda::capture_of(caller);
    if (capture_ == 0) tail_ = true;
  }
  // Orders `caller` behind it. Called where there is no obstacle.
  void wait(cudaStream_t caller, SideStream& side) {
    const std::uint64_t here = xd::cuda::capture_of(caller);
    if (here != 0 ? capture_ != here : !tail_) return;
    side.order(side.get(), caller);
    under_way_ = false;
  }
  // Likewise, for an operation: the one after it finds nothing to be ordered behind.
  void join(cudaStream_t caller, SideStream& side) {
    wait(caller, side);
    if (!xd::cuda::is_captured(caller)) {
      tail_ = false;
    } else {
      capture_ = 0;
    }
  }

 private:
  bool under_way_ = false;
  bool tail_ = false;  // outside captures, no operation has been ordered behind the last one
  std::uint64_t capture_ = 0;  // in which one was begun that no operation has been ordered behind
};

}  // namespace xd::gemm::cuda
