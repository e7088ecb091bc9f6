// Bounds the waits of an engine's products. NCCL waits for ranks without a bound, and nothing that
// has been enqueued can be called back. So a thread looks after every product until it has ended:
//
//   enqueue()   the call into cuBLASMp   bounded by the communicator's timeout
//   stream      work in front of it      not this product's: not bounded here
//   stream      the product              bounded likewise, from when the stream has come to it
//
// A product that takes longer is a TIMEOUT, which finishes the communicator. An end of the
// communicator while a product is under way stops the engine: the product ends, and the stream that
// the caller may be waiting for goes on.
//
// Nothing that a product may use is freed while it is under way. Where that does not end, it is
// kept until the process ends.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <thread>

#include "comm/comm.h"
#include "gemm/cublasmp/engine.h"

namespace xd::gemm::cublasmp {

// Places in front of a product and behind it in its stream. They may be used again.
class Marks {
 public:
  virtual ~Marks() = default;
  virtual void begin(cudaStream_t stream) = 0;
  virtual void end(cudaStream_t stream) = 0;
  // True when the stream has come to the place. Any thread, behind end().
  virtual bool begun() const noexcept = 0;
  virtual bool ended() const noexcept = 0;
};
using MakeMarks = std::function<std::unique_ptr<Marks>()>;

// The turn in which the ranks have agreed about a product.
struct ProductTurn {
  int group = -1;
  std::int32_t operation = -1;
  std::uint64_t epoch = 0;
};

class Attendant {
 public:
  // For how long an end waits, or for the communicator's timeout where that is less: for products,
  // and for the ranks that end their engines.
  static constexpr int kPatienceMs = 5000;

  Attendant(Comm& comm, std::shared_ptr<Engine> engine, MakeMarks make_marks);
  // All ranks end theirs, in any order. Waits for products that are under way, and then for the
  // other ranks, for so long each.
  ~Attendant();
  Attendant(const Attendant&) = delete;
  Attendant& operator=(const Attendant&) = delete;

  Engine& engine() const;
  // Engine::enqueue(). One thread at a time.
  void enqueue(const ProductTurn& turn, const Description& description, const Operands& operands,
               cudaStream_t stream);

 private:
  struct Watched;
  static void attend(Watched& watched);
  bool end_engine() noexcept;
  Deadline patience() const;

  Comm& comm_;
  const std::shared_ptr<Watched> watched_;  // the thread's, too
  std::thread thread_;
};

}  // namespace xd::gemm::cublasmp
