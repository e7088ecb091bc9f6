#include "cuda/stream.h"

#include "cuda/driver.h"

namespace xd::cuda {
namespace {

bool is_default_stream(cudaStream_t stream) {
  return stream == nullptr || stream == cudaStreamLegacy || stream == cudaStreamPerThread;
}

// cudaErrorStreamCaptureUnsupported and its neighbours.
bool is_capture_error(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

}  // namespace

bool takes_work(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusInvalidated;
  cudaGetLastError();
  return !is_capture_error(error);
}

int multiprocessors_of(cudaStream_t stream, int all) {
  const Driver& functions = driver();
  if (is_default_stream(stream) || functions.cuStreamGetGreenCtx == nullptr ||
      functions.cuGreenCtxGetDevResource == nullptr) {
    return all;
  }
  CUgreenCtx context = nullptr;
  if (functions.cuStreamGetGreenCtx(stream, &context) != CUDA_SUCCESS || context == nullptr) {
    return all;
  }
  CUdevResource part{};
  const CUresult error =
      functions.cuGreenCtxGetDevResource(context, &part, CU_DEV_RESOURCE_TYPE_SM);
  const auto count = static_cast<int>(part.sm.smCount);
  return error == CUDA_SUCCESS && count >= 1 && count < all ? count : all;
}

}  // namespace xd::cuda
