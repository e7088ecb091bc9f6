// A rank's memory, with operations on a stream of the test's own choice.
#pragma once

#include <cuda_runtime_api.h>

#include <memory>

#include "conformance/cuda/graph.h"
#include "support/world.h"

namespace xd::test {

// The memory of a rank, with another stream. Copies happen when the stream has come to rest.
class OnStream final : public Memory {
 public:
  OnStream(Memory& base, cudaStream_t stream) : base_(base), stream_(stream) {}

  DLDevice device() const override { return base_.device(); }
  xd_stream stream() const override { return stream_; }
  void* allocate(std::size_t bytes) override { return base_.allocate(bytes); }
  void release(void* ptr) override { base_.release(ptr); }
  void copy_in(void* device, const void* host, std::size_t bytes) override {
    synchronize();
    base_.copy_in(device, host, bytes);
  }
  void copy_out(void* host, const void* device, std::size_t bytes) override {
    synchronize();
    base_.copy_out(host, device, bytes);
  }
  // No test enqueues anything on a default stream, so there is nothing to wait for.
  void synchronize() override {
    if (stream_ != nullptr) cuda_ok(cudaStreamSynchronize(stream_), "cudaStreamSynchronize");
  }
  std::unique_ptr<Memory> another_stream() const override { return base_.another_stream(); }
  std::unique_ptr<Memory> of_virtual_memory() const override { return base_.of_virtual_memory(); }
  std::size_t device_bytes_used() const override { return base_.device_bytes_used(); }

 private:
  Memory& base_;
  cudaStream_t stream_;
};

}  // namespace xd::test
