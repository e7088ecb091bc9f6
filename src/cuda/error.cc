#include "cuda/error.h"

#include <string_view>

#include "base/error.h"

namespace xd::cuda {
namespace {

// "cudaMalloc(&p, n)" -> "cudaMalloc"
std::string_view name_of(std::string_view call) { return call.substr(0, call.find('(')); }

}  // namespace

void fail_cuda(const char* call, cudaError_t error) {
  cudaGetLastError();
  fail(error == cudaErrorMemoryAllocation ? XD_ERROR_OUT_OF_MEMORY : XD_ERROR_SYSTEM,
       name_of(call), ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

}  // namespace xd::cuda
