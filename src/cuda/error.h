// Turns errors of the CUDA runtime and driver into this library's errors.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>

namespace xd::cuda {

// Throws with the call's name and the reason: OUT_OF_MEMORY if memory has run out, else SYSTEM.
// Clears the runtime's record of the error, which is not the caller's.
[[noreturn]] void fail_cuda(const char* call, cudaError_t error);
[[noreturn]] void fail_cuda(const char* call, CUresult error);

inline void check(cudaError_t error, const char* call) {
  if (error != cudaSuccess) [[unlikely]]
    fail_cuda(call, error);
}
inline void check(CUresult error, const char* call) {
  if (error != CUDA_SUCCESS) [[unlikely]]
    fail_cuda(call, error);
}

}  // namespace xd::cuda

// XD_CUDA_CHECK(cudaMemcpyAsync(...)): the text of the error names the function.
#define XD_CUDA_CHECK(call) ::xd::cuda::check((call), #call)
