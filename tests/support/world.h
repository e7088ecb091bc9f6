// How a program that crossdock-run started gets its ranks.
//
// As processes, each process is one rank, described by torchrun's variables. As threads, one
// process is told WORLD_SIZE and runs all ranks itself. run() hides the difference: it executes a
// body on every rank of this process. A body that throws leaves the shared communicator, so that
// its peers fail at once instead of waiting; the next run() makes a new one on all ranks.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/handles.h"
#include "support/hosts.h"
#include "support/memory.h"

namespace xd::test {

// One rank inside a body.
struct Rank {
  int rank;
  int num_ranks;
  bool threads;  // all ranks live in this process
  xd_comm* comm;
  Memory* memory;        // and the stream for operations
  std::string run_name;  // the same on all ranks, different in every run
  Hosts hosts;           // as the ranks of `comm` have named them

  xd_stream stream() const { return memory->stream(); }
  // True if calls of operations return before the operations have ended: see support/outcome.h.
  bool asynchronous() const { return stream() != nullptr; }
  // The most ranks of the launch that share a CUDA device.
  int ranks_on_device() const;
  // The same rank, enqueueing on another stream.
  Rank on(Memory& other) const;

  // Makes another communicator of the same ranks, on the same hosts. Collective. `name` tells apart
  // the communicators of one body.
  Comm another_comm(const std::string& name, std::size_t heap_bytes,
                    std::int32_t timeout_ms = kTimeoutMs,
                    xd_comm_peer_loss on_peer_loss = XD_COMM_PEER_LOSS_FATAL) const;
  // Likewise on other hosts.
  Comm comm_on(const Hosts& other, const std::string& name, std::size_t heap_bytes) const;

  static constexpr std::int32_t kTimeoutMs = 20000;
};

struct RankFailure {
  int rank;
  std::string text;
};

class World {
 public:
  // Throws std::runtime_error if crossdock-run's variables are missing or wrong, and Unavailable if
  // the executor cannot run this launch here.
  explicit World(const std::string& executor);

  int num_ranks() const { return num_ranks_; }
  bool threads() const { return threads_; }
  // The memory of the lowest rank in this process.
  Memory& memory() const { return *memories_.front(); }
  // True in the one process of the launch that prints what all have in common.
  bool reports() const { return threads_ || first_rank_ == 0; }

  // Executes body on every rank of this process and returns those that failed, also because a peer
  // did. Every process must make the same calls of run().
  std::vector<RankFailure> run(const std::function<void(Rank&)>& body);

  static constexpr std::size_t kHeapBytes = std::size_t{48} << 20;
  // Of the shared communicator: of more ranks than most tests have, each has less.
  std::size_t heap_bytes() const { return kHeapBytes / (num_ranks_ > 8 ? 16 : 1); }

 private:
  void run_rank(int local, const std::function<void(Rank&)>& body);

  bool threads_ = false;
  int num_ranks_ = 0;
  Hosts hosts_;                                    // as crossdock-run --hosts tells them
  int first_rank_ = 0;                             // this process's first
  std::vector<std::unique_ptr<Memory>> memories_;  // one per rank of this process
  std::vector<Comm> comms_;                        // likewise
  std::uint64_t runs_ = 0;
};

}  // namespace xd::test
