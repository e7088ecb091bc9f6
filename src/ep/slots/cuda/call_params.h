// Makes parameters of the kernels of low latency from checked arguments.
#pragma once

#include "cuda/known_memory.h"
#include "ep/slots/calls.h"
#include "ep/slots/cuda/params.h"

namespace xd::ep::cuda {

// Each fills in its half of a call's parameters, and throws INVALID_ARGUMENT where a tensor is not
// memory that kernels may touch. The caller fills in `group`, `step`, and the launch's shape.
void add_send(const LlDispatchSend& call, xd::cuda::KnownMemory& known, LlGivenParams& params);
void add_receive(const LlDispatchReceive& call, std::size_t plan_bytes,
                 xd::cuda::KnownMemory& known, LlGivenParams& params);
void add_send(const LlCombineSend& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known,
              LlCombineParams& params);
void add_receive(const LlCombineReceive& call, std::size_t plan_bytes, xd::cuda::KnownMemory& known,
                 LlCombineParams& params);

}  // namespace xd::ep::cuda
