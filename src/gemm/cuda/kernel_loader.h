// Loads the kernels of cuBLASLt before an operation launches them.
//
// A kernel is loaded when it is first launched on a device. A launch that has to load one may wait
// for kernels that run, and one that waits for a peer ends only when that peer has come: if the
// peer is a thread of the same process, it may itself wait for the lock under which kernels are
// launched. So no operation launches a kernel for the first time. Each algorithm is launched once
// per process and device with small operands that mean nothing: when a context is made, for all
// that the context expects, and else before the operation that needs it enqueues anything. The
// latter may still wait for an earlier operation of this rank whose peers are threads of the
// process, so products take an algorithm that has been launched where there is one.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "cuda/cublaslt.h"
#include "cuda/memory.h"
#include "cuda/stream.h"

namespace xd::gemm::cuda {

class KernelLoader {
 public:
  static constexpr std::size_t kOperandBytes = std::size_t{1} << 20;
  static constexpr std::size_t kWorkspaceBytes = std::size_t{8} << 20;
  static constexpr std::size_t kBytes = kOperandBytes + kWorkspaceBytes;  // of the device
  // Up to so many rows, a kernel that has been launched says nothing about other numbers of rows.
  static constexpr std::int64_t kFewRows = 16;

  // Called with the device current, as the other functions.
  explicit KernelLoader(int device);
  ~KernelLoader();
  KernelLoader(const KernelLoader&) = delete;
  KernelLoader& operator=(const KernelLoader&) = delete;

  // True if products of this kind have been launched by the algorithm.
  bool has(const xd::cuda::ProductShape& shape, const xd::cuda::lt::Algorithm& algorithm) const;
  // The algorithms by which they have been.
  std::vector<xd::cuda::lt::Algorithm> all_of(const xd::cuda::ProductShape& shape) const;
  // Launches a product of each number of rows that counts, where none has been, once per process
  // and device. `shapes` have types and the order of elements. Nothing where cuBLASLt has no such
  // product.
  void load_all(const xd::cuda::ProductLibrary& library,
                const std::vector<xd::cuda::ProductShape>& shapes);
  // Says that it has been launched.
  static void note(int device, const xd::cuda::ProductShape& shape,
                   const xd::cuda::lt::Algorithm& algorithm);
  // Launches it, with and without C, where it has not been. False: it has not, as no small product
  // can take it.
  bool load(const xd::cuda::ProductLibrary& library, const xd::cuda::ProductShape& shape,
            const xd::cuda::lt::Algorithm& algorithm);
  // Waits until all that has been launched has ended.
  void synchronize() const { stream_.synchronize(); }

 private:
  void load_any(const xd::cuda::ProductLibrary& library, const xd::cuda::ProductShape& shape);
  bool launch(const xd::cuda::ProductLibrary& library, const xd::cuda::ProductShape& shape,
              const xd::cuda::lt::Algorithm& algorithm);

  const int device_;
  xd::cuda::Stream stream_;
  xd::cuda::DeviceBuffer operands_, workspace_;
};

}  // namespace xd::gemm::cuda
