#include "conformance/cuda/graph.h"

#include <stdexcept>
#include <string>

namespace xd::test {

void cuda_ok(cudaError_t error, const char* call) {
  if (error == cudaSuccess) return;
  throw std::runtime_error(std::string(call) + ": " + cudaGetErrorString(error));
}

Graph::Graph(const Rank& rank, const std::function<void()>& enqueue) : stream_(rank.stream()) {
  cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
  // Other threads of the process go on; this one may not wait for anything.
  cuda_ok(cudaStreamBeginCapture(stream_, cudaStreamCaptureModeThreadLocal), "begin of capture");
  try {
    enqueue();
  } catch (...) {
    cudaStreamEndCapture(stream_, &graph_);
    if (graph_) cudaGraphDestroy(graph_);
    throw;
  }
  cuda_ok(cudaStreamEndCapture(stream_, &graph_), "end of capture");
  cuda_ok(cudaGraphInstantiate(&executable_, graph_, 0), "cudaGraphInstantiate");
}

Graph::~Graph() {
  if (executable_) cudaGraphExecDestroy(executable_);
  if (graph_) cudaGraphDestroy(graph_);
}

void Graph::launch() const { cuda_ok(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

Capture::Capture(const Rank& rank, cudaStream_t stream, cudaStreamCaptureMode mode)
    : stream_(stream) {
  cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
  cuda_ok(cudaStreamBeginCapture(stream_, mode), "begin of capture");
}

cudaError_t Capture::end() {
  if (stream_ == nullptr) return cudaSuccess;
  cudaGraph_t graph = nullptr;
  const cudaError_t error = cudaStreamEndCapture(stream_, &graph);
  stream_ = nullptr;
  if (graph != nullptr) cudaGraphDestroy(graph);
  cudaGetLastError();
  return error;
}

}  // namespace xd::test
