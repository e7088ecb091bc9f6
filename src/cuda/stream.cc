#include "cuda/stream.h"

#include <map>
#include <mutex>
#include <utility>
#include <vector>

#include "cuda/driver.h"

namespace xd::cuda {
namespace {

// Streams that are not in use at the moment, by device and priority. The pool is never destroyed,
// since other static destructors may give streams back.
struct StreamPool {
  std::mutex mutex;
  std::map<std::pair<int, Priority>, std::vector<cudaStream_t>> idle;

  static StreamPool& instance() {
    static StreamPool& pool = *new StreamPool;
    return pool;
  }
};

bool is_default_stream(cudaStream_t stream) {
  return is_legacy_stream(stream) || stream == cudaStreamPerThread;
}

// True for cudaErrorStreamCaptureUnsupported and the neighbouring codes.
bool is_capture_error(cudaError_t error) {
  return error >= cudaErrorStreamCaptureUnsupported && error <= cudaErrorStreamCaptureWrongThread;
}

// nullptr = none: that of the device itself. (A driver that knows no green contexts has none.)
CUgreenCtx green_context_of(cudaStream_t stream) {
  const Driver& functions = driver();
  if (is_default_stream(stream) || functions.cuStreamGetGreenCtx == nullptr) return nullptr;
  CUgreenCtx context = nullptr;
  return functions.cuStreamGetGreenCtx(stream, &context) == CUDA_SUCCESS ? context : nullptr;
}

}  // namespace

Stream::Stream(int device, Priority priority) : device_(device), priority_(priority) {
  {
    StreamPool& pool = StreamPool::instance();
    const std::lock_guard lock(pool.mutex);
    std::vector<cudaStream_t>& idle = pool.idle[{device, priority}];
    if (!idle.empty()) {
      stream_ = idle.back();
      idle.pop_back();
      return;
    }
  }
  const DeviceGuard guard(device);
  int least = 0, greatest = 0;
  XD_CUDA_CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest));
  XD_CUDA_CHECK(cudaStreamCreateWithPriority(&stream_, cudaStreamNonBlocking,
                                             priority == Priority::highest ? greatest : least));
}

void Stream::give_back() noexcept {
  if (stream_ == nullptr || !usable_in_this_process()) return;
  StreamPool& pool = StreamPool::instance();
  const std::lock_guard lock(pool.mutex);
  try {
    pool.idle[{device_, priority_}].push_back(stream_);
  } catch (...) {  // no host memory for the pool: the stream is lost
  }
}

bool takes_work(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  const cudaError_t error = cudaStreamIsCapturing(stream, &status);
  if (error == cudaSuccess) return status != cudaStreamCaptureStatusInvalidated;
  cudaGetLastError();
  return !is_capture_error(error);
}

bool is_captured(cudaStream_t stream) {
  cudaStreamCaptureStatus status{};
  if (cudaStreamIsCapturing(stream, &status) == cudaSuccess) {
    return status != cudaStreamCaptureStatusNone;
  }
  cudaGetLastError();
  return false;
}

std::uint64_t capture_of(cudaStream_t stream) {
  constexpr std::uint64_t kInvalidated = ~std::uint64_t{0};
  cudaStreamCaptureStatus status{};
  unsigned long long id = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) {
    cudaGetLastError();
    return takes_work(stream) ? 0 : kInvalidated;
  }
  if (status == cudaStreamCaptureStatusNone) return 0;
  return status == cudaStreamCaptureStatusActive ? id : kInvalidated;
}

bool is_of_green_context(cudaStream_t stream) { return green_context_of(stream) != nullptr; }

int multiprocessors_of(cudaStream_t stream, int all) {
  const Driver& functions = driver();
  const CUgreenCtx context = green_context_of(stream);
  if (context == nullptr || functions.cuGreenCtxGetDevResource == nullptr) return all;
  CUdevResource part{};
  const CUresult error =
      functions.cuGreenCtxGetDevResource(context, &part, CU_DEV_RESOURCE_TYPE_SM);
  const auto count = static_cast<int>(part.sm.smCount);
  return error == CUDA_SUCCESS && count >= 1 && count < all ? count : all;
}

}  // namespace xd::cuda
