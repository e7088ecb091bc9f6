#include "gemm/cuda/meeting.h"

#include <thread>

#include "base/interrupt.h"
#include "cuda/error.h"
#include "gemm/cuda/kernels.h"

namespace xd::gemm::cuda {

std::optional<std::uint64_t> Meeting::hold(const EnqueuedTurn& turn, SideStream& side,
                                           Comm& comm) const {
  turn.open(side.get());
  XD_CUDA_CHECK(cudaMemcpyAsync(control_.data(), turn.params().group.control, sizeof(Control),
                                cudaMemcpyDeviceToHost, side.get()));
  const cudaEvent_t known = side.record(side.get());
  launch_close(turn.params(), side.get());
  wait(known, turn.params(), comm);
  comm.errors().throw_if_failed();
  const Control& left = *control_.as<const Control>();
  if (left.agreed == 0) return std::nullopt;
  return left.opened;
}

// The opening's own wait is bounded. Work that stands in front of it in the stream has no bound.
void Meeting::wait(cudaEvent_t known, const TurnParams& turn, Comm& comm) const {
  const Deadline deadline = comm.deadline();
  Interruption interruption;
  for (;;) {
    const cudaError_t state = cudaEventQuery(known);
    if (state == cudaSuccess) return;
    if (state != cudaErrorNotReady) XD_CUDA_CHECK(state);
    cudaGetLastError();  // not an error, but recorded as one
    comm.errors().throw_if_failed();
    if (interruption.requested()) comm.errors().abort();
    if (deadline.passed()) {
      comm.errors().raise_and_throw({.status = XD_ERROR_TIMEOUT,
                                     .rank = comm.rank(),
                                     .group = turn.group.number,
                                     .operation = turn.record.call.operation,
                                     .timeout_ms = comm.timeout_ms()},
                                    Spread::everywhere);
    }
    std::this_thread::yield();
  }
}

}  // namespace xd::gemm::cuda
