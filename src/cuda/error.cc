#include "cuda/error.h"

#include <string_view>

#include "base/error.h"
#include "cuda/driver.h"

namespace xd::cuda {
namespace {

// "cudaMallocAsync(&p, n, s)" -> "cudaMallocAsync", "driver().cuMemMap(...)" -> "cuMemMap"
std::string_view name_of(std::string_view call) {
  constexpr std::string_view kTable = "driver().";
  if (call.starts_with(kTable)) call.remove_prefix(kTable.size());
  return call.substr(0, call.find('('));
}

}  // namespace

void fail_cuda(const char* call, cudaError_t error) {
  cudaGetLastError();
  fail(error == cudaErrorMemoryAllocation ? XD_ERROR_OUT_OF_MEMORY : XD_ERROR_SYSTEM, name_of(call),
       ": ", cudaGetErrorString(error), " (", cudaGetErrorName(error), ")");
}

void fail_cuda(const char* call, CUresult error) {
  const char* name = nullptr;
  const char* text = nullptr;
  driver().cuGetErrorName(error, &name);
  driver().cuGetErrorString(error, &text);
  fail(error == CUDA_ERROR_OUT_OF_MEMORY ? XD_ERROR_OUT_OF_MEMORY : XD_ERROR_SYSTEM, name_of(call),
       ": ", text != nullptr ? text : "unknown error", " (", name != nullptr ? name : "?", " ",
       static_cast<int>(error), ")");
}

}  // namespace xd::cuda
