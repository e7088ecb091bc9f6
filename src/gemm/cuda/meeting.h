// A turn in which ranks do nothing but agree, and for whose outcome the host waits: for what cannot
// be undone once it has been enqueued. The turn stands on the context's own stream, so it need not
// wait for the work in the caller's.
#pragma once

#include <cstdint>
#include <optional>

#include "comm/comm.h"
#include "cuda/memory.h"
#include "cuda/side_stream.h"
#include "gemm/cuda/operations.h"

namespace xd::gemm::cuda {

class Meeting {
 public:
  explicit Meeting(int device) : control_(device, sizeof(Control)) {}

  // The epoch, if all ranks have come with the same record. If they differ, the kernels have told
  // it. Throws the error that finishes the communicator; a TIMEOUT includes the work for which the
  // stream of `side` waits.
  std::optional<std::uint64_t> hold(const EnqueuedTurn& turn, SideStream& side, Comm& comm) const;

 private:
  void wait(cudaEvent_t known, const TurnParams& turn, Comm& comm) const;

  xd::cuda::PinnedBlock control_;  // a copy of Control, for what the opening leaves there
};

}  // namespace xd::gemm::cuda
