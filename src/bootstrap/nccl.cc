#include "bootstrap/nccl.h"

#include <dlfcn.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/error.h"
#include "base/thread.h"
#include "bootstrap/bootstrap.h"
#include "bootstrap/messages.h"

#if XD_CUDA
#include "cuda/device.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#endif

namespace xd {
namespace {

constexpr auto kLookAgain = std::chrono::microseconds(100);

// The handle with which dlsym() finds NCCL. RTLD_DEFAULT is NULL, so no handle means "nowhere".
void* locate(const char* name) {
  if (::dlsym(RTLD_DEFAULT, "ncclCommCount") != nullptr) return RTLD_DEFAULT;
  if (void* const loaded = ::dlopen(name, RTLD_NOW | RTLD_NOLOAD)) return loaded;
  if (void* const opened = ::dlopen(name, RTLD_NOW | RTLD_LOCAL)) return opened;
  const char* const reason = ::dlerror();
  fail(XD_ERROR_UNSUPPORTED, "config.bootstrap = XD_BOOTSTRAP_NCCL: this process has no NCCL: ",
       reason != nullptr ? reason : name);
}

template <class Function>
void look_up(void* handle, const char* name, Function& function, std::string& missing) {
  function = reinterpret_cast<Function>(::dlsym(handle, name));
  if (function == nullptr) missing += (missing.empty() ? "" : ", ") + std::string(name);
}

}  // namespace

void NcclLibrary::check(int result, const char* call) const {
  if (result == kSuccess) return;
  fail(XD_ERROR_SYSTEM, call, ": ", get_error_string(result), " (NCCL result ", result, ")");
}

NcclLibrary find_nccl(const char* name) {
  void* const handle = locate(name);
  NcclLibrary nccl;
  std::string missing;
  look_up(handle, "ncclCommCount", nccl.comm_count, missing);
  look_up(handle, "ncclCommUserRank", nccl.comm_user_rank, missing);
  look_up(handle, "ncclCommCuDevice", nccl.comm_cu_device, missing);
  look_up(handle, "ncclCommGetAsyncError", nccl.comm_get_async_error, missing);
  look_up(handle, "ncclAllGather", nccl.all_gather, missing);
  look_up(handle, "ncclGetErrorString", nccl.get_error_string, missing);
  if (!missing.empty())
    fail(XD_ERROR_UNSUPPORTED, "config.bootstrap = XD_BOOTSTRAP_NCCL: this process's NCCL has no ",
         missing);
  return nccl;
}

NcclSeat read_seat(const NcclLibrary& nccl, const xd_comm_config& config) {
  NcclSeat seat;
  nccl.check(nccl.comm_count(config.nccl_comm, &seat.num_ranks), "ncclCommCount");
  nccl.check(nccl.comm_user_rank(config.nccl_comm, &seat.rank), "ncclCommUserRank");
  nccl.check(nccl.comm_cu_device(config.nccl_comm, &seat.device), "ncclCommCuDevice");
  XD_REQUIRE(seat.num_ranks >= 1 && seat.num_ranks <= kMaxRanks, "config.nccl_comm has ",
             seat.num_ranks, " ranks, expected 1 to ", kMaxRanks);
  XD_REQUIRE(seat.rank >= 0 && seat.rank < seat.num_ranks, "config.nccl_comm is rank ", seat.rank,
             " of ", seat.num_ranks);
  XD_REQUIRE(config.num_ranks == 0 || config.num_ranks == seat.num_ranks,
             "config.num_ranks = ", config.num_ranks, ", expected 0 or the ", seat.num_ranks,
             " of config.nccl_comm");
  XD_REQUIRE(config.num_ranks == 0 || config.rank == seat.rank, "config.rank = ", config.rank,
             ", expected ", seat.rank, " as in config.nccl_comm");
  return seat;
}

bool wait_for_nccl(const NcclLibrary& nccl, NcclComm comm, const std::function<bool()>& landed,
                   NcclPatience& patience) {
  for (;;) {
    {
      const std::lock_guard lock(patience.mutex);
      if (patience.given_up) return false;
      int state = NcclLibrary::kSuccess;
      nccl.check(nccl.comm_get_async_error(comm, &state), "ncclCommGetAsyncError");
      // A non-blocking communicator enqueues later: until it has, the stream is idle.
      if (state != NcclLibrary::kInProgress) {
        nccl.check(state, "ncclAllGather");
        if (landed()) return true;
      }
    }
    std::this_thread::sleep_for(kLookAgain);
  }
}

#if XD_CUDA
namespace {

// One all-gather on a thread of its own: NCCL connects ranks when they first need it, inside the
// call, and waits there without limit for ranks that have not come. The calling thread waits here
// until its deadline and goes; the thread stays until NCCL lets it go (ncclCommAbort).
class Gathering {
 public:
  Gathering(const NcclLibrary& nccl, NcclComm comm, const NcclSeat& seat, Bytes slot)
      : nccl_(nccl), comm_(comm), seat_(seat), slot_(std::move(slot)) {}

  void run() noexcept {
    Bytes slots;
    std::optional<Error> failure;
    try {
      slots = gather();
    } catch (const Error& error) {
      failure = error;
    } catch (const std::exception&) {
      failure = Error(XD_ERROR_OUT_OF_MEMORY, std::string());
    }
    const std::lock_guard lock(patience_.mutex);
    slots_ = std::move(slots);
    failure_ = std::move(failure);
    ended_ = true;
    changed_.notify_all();
  }

  // Returns the slots of all ranks.
  Bytes wait(const Deadline& deadline) {
    std::unique_lock lock(patience_.mutex);
    if (!changed_.wait_until(lock, deadline.when(), [this] { return ended_; })) {
      patience_.given_up = true;
      fail(XD_ERROR_TIMEOUT, "ncclAllGather of rank ", seat_.rank, " of ", seat_.num_ranks,
           " did not end in time: some rank of config.nccl_comm has not come");
    }
    if (failure_) throw *failure_;
    return std::move(slots_);
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
    const cuda::DeviceGuard guard(seat_.device);
    auto memory =
        std::make_unique<Memory>(seat_.device, slot_.size(), slot_.size() * at(seat_.num_ranks));
    std::memcpy(memory->sent.data(), slot_.data(), slot_.size());
    // Until the kernel is known to have ended, the memory belongs to the kernel, even if this
    // function throws.
    Memory& used = *memory.release();
    const int result = nccl_.all_gather(used.sent.data(), used.received.data(), slot_.size(),
                                        NcclLibrary::kInt8, comm_, used.stream.get());
    if (result != NcclLibrary::kInProgress) nccl_.check(result, "ncclAllGather");
    const auto landed = [&] { return idle(used.stream); };
    if (!wait_for_nccl(nccl_, comm_, landed, patience_)) return {};
    memory.reset(&used);
    const std::byte* const all = memory->received.data();
    return {all, all + slot_.size() * at(seat_.num_ranks)};
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
  const NcclSeat seat_;
  const Bytes slot_;
  NcclPatience patience_;  // its mutex guards all members below
  std::condition_variable changed_;
  bool ended_ = false;
  Bytes slots_;
  std::optional<Error> failure_;
};

class NcclBootstrap final : public Bootstrap {
 public:
  NcclBootstrap(const NcclLibrary& nccl, NcclComm comm, const NcclSeat& seat)
      : Bootstrap(seat.rank, seat.num_ranks), nccl_(nccl), comm_(comm), seat_(seat) {}

  std::vector<Bytes> all_gather(std::span<const std::byte> blob,
                                const Deadline& deadline) override {
    const auto gathering = std::make_shared<Gathering>(nccl_, comm_, seat_, make_slot(blob));
    start_thread("xd-nccl", [gathering] { gathering->run(); }).detach();
    return read_slots(gathering->wait(deadline), num_ranks(), blob.size(), "ncclAllGather");
  }

 private:
  const NcclLibrary nccl_;
  const NcclComm comm_;
  const NcclSeat seat_;
};

}  // namespace

std::unique_ptr<Bootstrap> meet_by_nccl(const NcclLibrary& nccl, NcclComm comm,
                                        const NcclSeat& seat) {
  return std::make_unique<NcclBootstrap>(nccl, comm, seat);
}

#endif

}  // namespace xd
