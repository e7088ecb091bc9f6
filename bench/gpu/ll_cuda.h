// The low-latency measurement on CUDA devices.
#pragma once

#include "../ll_run.h"

namespace bench::gpu {

// Ranks go to devices in turn. Collective. The results are complete on rank 0 and empty on the
// others. `clock` of a step:
//   events   by two events on the stream around the operation, behind a common start
//   kernel   by the device's clock before and after the operation, less what an empty kernel on all
//            multiprocessors takes in its place
//   graph    of 20 operations in a CUDA graph, each
LlResults run_ll(const Launch& launch, int rank, const Workload& workload);

}  // namespace bench::gpu
