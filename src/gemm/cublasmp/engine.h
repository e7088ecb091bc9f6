// cuBLASMp on one rank: a handle of it, its communicator of NCCL, two grids, working memory.
//
// Everything here may wait for the other ranks without a bound, since NCCL does: see attendant.h.
// An engine ends in one of two ways:
//
//   release()               all ranks at once, no product under way: everything is given back
//   stop(), then give_up()  a rank alone: stop() ends what NCCL waits for, whatever runs; when no
//                           product runs any more, give_up() gives NCCL's communicator back.
//                           cuBLASMp's own ends need all ranks, so the rest stays where it is.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <mutex>
#include <string>
#include <vector>

#include "cuda/stream.h"
#include "gemm/cublasmp/layout.h"
#include "gemm/cublasmp/library.h"

namespace xd::gemm::cublasmp {

// The ranks of an engine, and where its communicator comes from.
struct Ranks {
  int count = 1, rank = 0;
  nccl::Comm lent = nullptr;  // by the caller of the library; nullptr = make one by `id`
  nccl::UniqueId id{};
};

// Of a product, for every rank alike.
struct Sizes {
  std::int64_t tokens = 0, n = 0, k = 0;
};

class Engine {
 public:
  // All ranks make theirs at once, with the device current. The handle keeps `stream`, and uses it
  // for nothing but enqueue_small().
  Engine(const Library& library, const Config& config, const Ranks& ranks, xd::cuda::Stream stream);
  ~Engine() { release(); }
  Engine(const Engine&) = delete;
  Engine& operator=(const Engine&) = delete;

  const Abilities& abilities() const { return abilities_; }
  // Enqueues a small product of each of the config's operations, all ranks at once: NCCL connects
  // ranks when they first need it. It leaves out those that are refused. `matrices`: so many bytes.
  void enqueue_small(std::byte* matrices);
  static std::size_t small_bytes(const Config& config);
  // Throws UNSUPPORTED where cuBLASMp cannot do it, or needs more working memory than was taken.
  // Local; elements are not looked at. cuBLASMp tells some of what it cannot do when it is to
  // enqueue the product and not before (kinds.h).
  void require(const Description& description, const Operands& operands);
  // Enqueues the product. The peers have to do so, too. Throws UNSUPPORTED if cuBLASMp refuses it,
  // or if the engine has been stopped.
  void enqueue(const Description& description, const Operands& operands, cudaStream_t stream);

  // Leaves everything where it is after stop(). Once.
  void release() noexcept;
  // Any thread, also beside the others here. A communicator that was lent is its owner's to free.
  void stop() noexcept;
  void give_up() noexcept;
  bool stopped() const { return stopped_.load(std::memory_order_acquire); }

 private:
  struct Bytes {
    std::size_t device = 0, host = 0;
  };

  void connect(const Ranks& ranks);
  void require_running() const;
  void abort() noexcept;
  void reserve_host_memory(std::size_t bytes);
  void make_grids(int ranks);
  void make_descriptors();
  void take_memory();
  std::vector<ProductCall> plain_calls(const Sizes& sizes);
  void describe(const Description& description, const Operands& operands);
  void describe(mp::Matrix matrix, const Spread& spread);
  Bytes bytes_for(const Description& description, const Operands& operands);
  template <class T>
  void set(mp::Attribute attribute, const T& value) {
    set(attribute, &value, sizeof(value));
  }
  void set(mp::Attribute attribute, const void* value, std::size_t bytes);

  const Library& library_;
  const Config config_;
  Abilities abilities_{};
  nccl::Comm comm_ = nullptr;
  bool own_comm_ = false;
  std::mutex mutex_;               // explain() may be called beside an operation; not for stop()
  const xd::cuda::Stream stream_;  // the handle's, but while it enqueues
  mp::Handle handle_ = nullptr;
  mp::Grid column_ = nullptr, row_ = nullptr;  // of ranks
  mp::Matrix first_ = nullptr, second_ = nullptr, d_ = nullptr;
  mp::Operation operation_ = nullptr;
  void* memory_ = nullptr;
  std::size_t memory_bytes_ = 0;
  bool registered_ = false;  // with row_, too
  // The last one is in use. The others stay, as a product that runs may still read them.
  std::deque<std::vector<std::byte>> host_memory_;
  std::vector<std::int64_t> starts_;  // of the plain calls
  std::atomic<bool> stopped_{false}, aborted_{false};
  bool released_ = false;
};

// The reason why an engine cannot use a communicator that the caller lends; empty if it can.
std::string why_not_lent(const Library& library);

}  // namespace xd::gemm::cublasmp
