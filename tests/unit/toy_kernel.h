// The toy family on CUDA devices: what its kernel gets, and the kernel's launch.
#pragma once

#include <cuda_runtime_api.h>

#include "turn/device_group.h"
#include "unit/toy_family.h"

namespace xd::toy {

struct Findings {};
using Control = turn::DeviceControl;
using Report = turn::DeviceReport<Record, Findings>;
using Group = turn::DeviceGroup<Control, Report, Map>;
struct Params : turn::DeviceTurnParams<Group, Record> {
  std::uint64_t number;
};

// Loads the kernel, so that no launch has to wait for kernels that run.
void load_kernel();
// Launches one turn on the current device.
void launch(const Params& params, cudaStream_t stream);

}  // namespace xd::toy
