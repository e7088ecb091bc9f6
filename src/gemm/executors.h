// The executors of this build: who carries out the operations of contexts on one kind of device.
//
// Each defines an Executor; executors.cc alone names them.
#pragma once

#include <crossdock/gemm.h>
#include <dlpack/dlpack.h>

#include <memory>
#include <span>

#include "comm/feature.h"
#include "gemm/config.h"
#include "gemm/context.h"

namespace xd::gemm {

struct Executor {
  std::int32_t device_type;  // a DLDeviceType: of the ranks whose contexts it carries out
  // Collective.
  std::unique_ptr<Context> (*make_context)(std::shared_ptr<Comm> comm,
                                           const xd_gemm_config* config);
  // The memory that a context takes on one rank.
  xd_gemm_memory (*context_memory)(const Config& config);
  // Whether what it stands on is there, on this machine. Never blocks on a device.
  Feature (*availability)();
  // Likewise cuBLASMp; nullptr = it is not for such devices.
  Feature (*cublasmp)() = nullptr;
};

namespace cpu {
extern const Executor kExecutor;
}
namespace cuda {
extern const Executor kExecutor;  // in builds for CUDA
}

std::span<const Executor* const> executors();

// Throws UNSUPPORTED where this build has none for such devices.
const Executor& executor_for(std::int32_t device_type);

// Available where any executor is; else the reason of the first.
Feature feature();
// Likewise, whether cuBLASMp can compute some.
Feature cublasmp_feature();

}  // namespace xd::gemm
