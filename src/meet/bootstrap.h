// The way ranks find one another: one exchange of a small blob per rank, before anything is shared.
//
// Four ways in, one result: a TCP meeting point named by a unique id, the same meeting point named
// by torchrun's environment, a caller's all-gather, or a caller's NCCL communicator.
#pragma once

#include <crossdock/comm.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <vector>

#include "base/deadline.h"
#include "base/tcp.h"
#include "base/wire.h"

namespace xd {

class Bootstrap {
 public:
  virtual ~Bootstrap() = default;
  int rank() const { return rank_; }
  int num_ranks() const { return num_ranks_; }

  // Makes this rank's blob, and must not throw. `here` is the address from which this rank reaches
  // the meeting point; nullptr where the ranks meet in another way. It may be asked again, as a
  // meeting point may go away and another take its place.
  using MakeBlob = std::function<Bytes(const TcpAddress* here)>;

  // result[r] = the blob of rank r. The blobs have equal sizes on all ranks, at most kMaxBlob
  // bytes. May be called once, but see can_repeat(). Throws TIMEOUT naming the ranks that did not
  // come, MISMATCH, SYSTEM.
  virtual std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline& deadline) = 0;

  // True if all ranks may call all_gather() any number of times; there is no meeting point then.
  virtual bool can_repeat() const { return false; }

  // True if a call that has thrown may be made again, with another blob: the peers wait for that
  // call.
  virtual bool can_come_again() const { return false; }

  static constexpr std::size_t kMaxBlob = 4096;

 protected:
  Bootstrap(int rank, int num_ranks) : rank_(rank), num_ranks_(num_ranks) {}

 private:
  int rank_, num_ranks_;
};

// A communicator of one rank meets no other rank.
std::unique_ptr<Bootstrap> make_lone_bootstrap();

// Validates the bootstrap part of `config` (already read with read_struct) and makes the bootstrap,
// which connects to nothing yet. Throws INVALID_ARGUMENT.
std::unique_ptr<Bootstrap> make_bootstrap(const xd_comm_config& config);

// A foreign all-gather wants as many bytes from every rank: blocks of equal size carry the blobs.
inline constexpr std::size_t kBlockBytes = sizeof(std::uint64_t) + Bootstrap::kMaxBlob;

// A block has a size, then the blob, then zeros.
Bytes make_block(std::span<const std::byte> blob);

// Reads the blobs out of the blocks of all ranks, each as long as this rank's. `what` names the
// all-gather in errors.
std::vector<Bytes> read_blocks(std::span<const std::byte> blocks, int num_ranks,
                               std::size_t blob_bytes, const char* what);

}  // namespace xd
