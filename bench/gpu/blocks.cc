#include "blocks.h"

#include <cuda.h>

#include <algorithm>
#include <cstdio>
#include <exception>

namespace bench::gpu {
namespace {

// This is the driver's function, since the runtime's only knows the kernels of this program.
using GetKernelParams = decltype(&cuGraphKernelNodeGetParams);

GetKernelParams find_get_kernel_params() {
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  const cudaError_t error = cudaGetDriverEntryPointByVersion(
      "cuGraphKernelNodeGetParams", &function, 12000, cudaEnableDefault, &found);
  const bool usable = error == cudaSuccess && found == cudaDriverEntryPointSuccess;
  return usable ? reinterpret_cast<GetKernelParams>(function) : nullptr;
}

int find_blocks(const std::function<void()>& enqueue, const Stream& stream) {
  const GetKernelParams get_params = find_get_kernel_params();
  if (get_params == nullptr) return 0;
  const Graph graph = capture_graph(stream, enqueue);
  std::size_t count = 0;
  ok(cudaGraphGetNodes(graph.get(), nullptr, &count), "cudaGraphGetNodes");
  std::vector<cudaGraphNode_t> nodes(count);
  ok(cudaGraphGetNodes(graph.get(), nodes.data(), &count), "cudaGraphGetNodes");
  unsigned most = 0;
  for (const cudaGraphNode_t node : nodes) {
    cudaGraphNodeType type{};
    ok(cudaGraphNodeGetType(node, &type), "cudaGraphNodeGetType");
    CUDA_KERNEL_NODE_PARAMS params{};
    if (type != cudaGraphNodeTypeKernel || get_params(node, &params) != CUDA_SUCCESS) continue;
    most = std::max(most, params.gridDimX * params.gridDimY * params.gridDimZ);
  }
  return static_cast<int>(most);
}

}  // namespace

int blocks_of(const std::string& name, const std::function<void()>& enqueue, const Stream& stream) {
  try {
    return find_blocks(enqueue, stream);
  } catch (const std::exception& error) {  // the times are useful without it
    std::fprintf(stderr, "crossdock-bench: blocks of %s: %s\n", name.c_str(), error.what());
    return 0;
  }
}

}  // namespace bench::gpu
