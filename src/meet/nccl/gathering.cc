// The all-gather of a caller's NCCL communicator, in builds with CUDA.
#include <chrono>
#include <condition_variable>
#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "cuda/device.h"
#include "cuda/driver.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "meet/bootstrap.h"
#include "meet/nccl/library.h"

namespace xd {
namespace {

// One all-gather on a thread of its own: NCCL connects ranks when they first need it, inside the
// call, and waits there without limit for ranks that have not come. The calling thread waits here
// until its deadline and goes; the thread stays until NCCL lets it go (ncclCommAbort).
class Gathering {
 public:
  Gathering(const NcclLibrary& nccl, NcclComm comm, const NcclRank& self, Bytes block)
      : nccl_(nccl), comm_(comm), self_(self), block_(std::move(block)) {}

  void run() noexcept {
    Bytes blocks;
    std::optional<Error> failure;
    try {
      blocks = gather();
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception&) {
      failure = Error(XD_ERROR_OUT_OF_MEMORY, std::string());
    }
    const std::lock_guard lock(patience_.mutex);
    blocks_ = std::move(blocks);
    failure_ = std::move(failure);
    ended_ = true;
    changed_.notify_all();
  }

  // Returns the blocks of all ranks.
  Bytes wait(const Deadline& deadline) {
    std::unique_lock lock(patience_.mutex);
    if (!changed_.wait_until(lock, deadline.when(), [this] { return ended_; })) {
      patience_.given_up = true;
      fail(XD_ERROR_TIMEOUT, "ncclAllGather of rank ", self_.rank, " of ", self_.num_ranks,
           " did not end in time: some rank of config.nccl_comm has not come");
    }
    if (failure_) throw *failure_;
    return std::move(blocks_);
  }

 private:
  // Pinned memory of the host. Kernels of all devices may use it, as ranks of one process need, and
  // nothing has to be copied.
  struct Memory {
    Memory(int device, std::size_t bytes, std::size_t bytes_of_all)
        : stream(device), sent(device, bytes), received(device, bytes_of_all) {}
    cuda::Stream stream;
    cuda::PinnedBlock sent, received;
  };

  Bytes gather() {
    const cuda::DeviceGuard guard(self_.device);
    auto memory =
        std::make_unique<Memory>(self_.device, block_.size(), block_.size() * at(self_.num_ranks));
    std::memcpy(memory->sent.data(), block_.data(), block_.size());
    // Until the kernel is known to have ended, the memory belongs to the kernel, even if this
    // function throws.
    Memory& used = *memory.release();
    const int result = nccl_.all_gather(used.sent.data(), used.received.data(), block_.size(),
                                        NcclLibrary::kInt8, comm_, used.stream.get());
    if (result != NcclLibrary::kInProgress) nccl_.check(result, "ncclAllGather");
    const auto landed = [&] { return idle(used.stream); };
    if (!wait_for_nccl(nccl_, comm_, landed, patience_)) return {};
    memory.reset(&used);
    const std::byte* const all = memory->received.data();
    return {all, all + block_.size() * at(self_.num_ranks)};
  }

  static bool idle(const cuda::Stream& stream) {
    const cudaError_t state = cudaStreamQuery(stream.get());
    if (state == cudaErrorNotReady) {
      cudaGetLastError();  // not an error, but recorded as one
      return false;
    }
    cuda::check(state, "cudaStreamQuery");
    return true;
  }

  static std::size_t at(int number) { return static_cast<std::size_t>(number); }

  const NcclLibrary nccl_;
  const NcclComm comm_;
  const NcclRank self_;
  const Bytes block_;
  NcclPatience patience_;  // its mutex guards all members below
  std::condition_variable changed_;
  bool ended_ = false;
  Bytes blocks_;
  std::optional<Error> failure_;
};

class NcclBootstrap final : public Bootstrap {
 public:
  NcclBootstrap(const NcclLibrary& nccl, NcclComm comm, const NcclRank& self)
      : Bootstrap(self.rank, self.num_ranks), nccl_(nccl), comm_(comm), self_(self) {}

  std::vector<Bytes> all_gather(const MakeBlob& make, const Deadline& deadline) override {
    const Bytes blob = make(nullptr);
    const auto gathering = std::make_shared<Gathering>(nccl_, comm_, self_, make_block(blob));
    start_thread("xd-nccl", [gathering] { gathering->run(); }).detach();
    return read_blocks(gathering->wait(deadline), num_ranks(), blob.size(), "ncclAllGather");
  }
  bool can_repeat() const override { return true; }

 private:
  const NcclLibrary nccl_;
  const NcclComm comm_;
  const NcclRank self_;
};

}  // namespace

std::unique_ptr<Bootstrap> bootstrap_by_nccl(const xd_comm_config& config) {
  cuda::driver();  // throws with what is missing
  const NcclLibrary nccl = find_nccl();
  const NcclRank self = read_nccl_rank(nccl, config);
  if (self.num_ranks == 1) return make_lone_bootstrap();
  return std::make_unique<NcclBootstrap>(nccl, config.nccl_comm, self);
}

}  // namespace xd
