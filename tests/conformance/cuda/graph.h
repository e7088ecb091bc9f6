// A captured CUDA graph, captures without one, and a device that is busy.
#pragma once

#include <cuda_runtime_api.h>

#include <functional>

#include "support/world.h"

namespace xd::test {

class Graph {
 public:
  // Captures what `enqueue` puts on the rank's stream. Calls that may wait are errors meanwhile.
  Graph(const Rank& rank, const std::function<void()>& enqueue);
  ~Graph();
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  // Launches on the rank's stream.
  void launch() const;

 private:
  cudaStream_t stream_;
  cudaGraph_t graph_ = nullptr;
  cudaGraphExec_t executable_ = nullptr;
};

// A stream while it is captured. The captured work is not kept.
class Capture {
 public:
  Capture(const Rank& rank, cudaStream_t stream, cudaStreamCaptureMode mode);
  ~Capture() { end(); }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

  // Ends the capture, once, and returns the result of cudaStreamEndCapture().
  cudaError_t end();

 private:
  cudaStream_t stream_;
};

// Throws with the call and the reason.
void cuda_ok(cudaError_t error, const char* call);

// Loads the kernel of occupy(), once per device and before other kernels wait on it.
void load_occupier(const Rank& rank);

// Occupies every multiprocessor of the rank's device, all its shared memory included, for that
// long, on the rank's stream.
void occupy(const Rank& rank, int milliseconds);

}  // namespace xd::test
