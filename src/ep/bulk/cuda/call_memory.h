// Checks the memory that operations are given: memory that their kernels cannot touch is a bad
// argument, not a fault of the device.
#pragma once

#include "cuda/known_memory.h"
#include "ep/bulk/calls.h"
#include "ep/bulk/local_calls.h"

namespace xd::ep::cuda {

// Each throws INVALID_ARGUMENT: see KnownMemory.
void require_memory(const PrepareCall& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known);
void require_memory(const DispatchCall& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known);
void require_memory(const CombineCall& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known);
void require_memory(const DispatchBwdCall& call, std::size_t plan_bytes,
                    xd::cuda::KnownMemory& known);
void require_memory(const CombineBwdCall& call, std::size_t plan_bytes,
                    xd::cuda::KnownMemory& known);
void require_memory(const RowExpertsCall& call, std::size_t plan_bytes,
                    xd::cuda::KnownMemory& known);
void require_memory(const RoutingLayoutCall& call, xd::cuda::KnownMemory& known);

}  // namespace xd::ep::cuda
