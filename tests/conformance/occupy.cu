// A kernel that leaves no multiprocessor of a device to others.
//
// It touches no memory and trusts no flag: every block takes all the shared memory that a block may
// have, so that one block fills a multiprocessor, and watches the clock.
#include <cstdint>

#include "conformance/cuda/graph.h"

namespace xd::test {
namespace {

__device__ std::uint64_t nanoseconds() {
  std::uint64_t now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__global__ void wait_kernel(std::uint64_t duration) {
  const std::uint64_t start = nanoseconds();
  while (nanoseconds() - start < duration) __nanosleep(1000);
}

int attribute(const Rank& rank, cudaDeviceAttr which) {
  int value = 0;
  cuda_ok(cudaDeviceGetAttribute(&value, which, rank.memory->device().device_id),
          "cudaDeviceGetAttribute");
  return value;
}

}  // namespace

void load_occupier(const Rank& rank) {
  cuda_ok(cudaSetDevice(rank.memory->device().device_id), "cudaSetDevice");
  cuda_ok(cudaFuncSetAttribute(wait_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               attribute(rank, cudaDevAttrMaxSharedMemoryPerBlockOptin)),
          "cudaFuncSetAttribute");
  wait_kernel<<<1, 1, 0, rank.stream()>>>(0);
  cuda_ok(cudaGetLastError(), "launch");
  rank.memory->synchronize();
}

void occupy(const Rank& rank, int milliseconds) {
  const int shared = attribute(rank, cudaDevAttrMaxSharedMemoryPerBlockOptin);
  const int blocks = attribute(rank, cudaDevAttrMultiProcessorCount);
  wait_kernel<<<static_cast<unsigned>(blocks), 1024, static_cast<std::size_t>(shared),
                rank.stream()>>>(static_cast<std::uint64_t>(milliseconds) * 1000000);
  cuda_ok(cudaGetLastError(), "launch");
}

}  // namespace xd::test
