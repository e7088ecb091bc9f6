// The toy family on CUDA devices: what its kernel gets, and the kernel's launch.
#pragma once

#include <cuda_runtime_api.h>

#include "turn/device/group.h"
#include "unit/toy_family.h"

namespace xd::toy {

struct Findings {};
using Control = turn::DeviceControl;
using Report = turn::DeviceReport<Record, Findings>;
using Group = turn::DeviceGroup<Control, Report, Map>;
struct Params : turn::DeviceTurnParams<Group, Record> {
  std::uint64_t number;
  // Not null: the kernel moves its number, and does not leave, until this word is not 0.
  std::uint64_t* gate;
  // A rank whose done flag this rank raises in its own memory in that rank's place, and says that
  // the rank has not found memory; -1 = none.
  int speaks_for;
  // The kernel moves nothing, and ends its turn in front of the gate.
  bool ends_ahead;
};

// Loads the kernel, so that no launch has to wait for kernels that run.
void load_kernel();
// Launches one turn on the current device.
void launch(const Params& params, cudaStream_t stream);

}  // namespace xd::toy
