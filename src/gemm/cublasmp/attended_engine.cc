#include "gemm/cublasmp/attended_engine.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/log.h"
#include "base/thread.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/memory.h"

namespace xd::gemm::cublasmp {
namespace {

constexpr auto kLookAgain = std::chrono::milliseconds(100);
constexpr int kPatienceMs = 5000;  // for the ranks that end their engines

// Work on a thread of its own, which outlives a caller that gives up.
class Errand {
 public:
  explicit Errand(std::function<void()> work) : work_(std::move(work)) {}

  // False: it has not ended by the deadline. Throws what the work has thrown.
  static bool run(std::function<void()> work, const Deadline& deadline) {
    const auto errand = std::make_shared<Errand>(std::move(work));
    start_thread("xd-cublasmp", [errand] { errand->do_it(); }).detach();
    std::unique_lock lock(errand->mutex_);
    const bool ended =
        errand->changed_.wait_until(lock, deadline.when(), [&] { return errand->ended_; });
    if (errand->failure_) throw *errand->failure_;
    return ended;
  }

 private:
  void do_it() noexcept {
    std::optional<Error> failure;
    try {
      work_();
    } catch (const Error& error) {
      failure = error;
    } catch (...) {
      failure = Error(XD_ERROR_OUT_OF_MEMORY, std::string());
    }
    work_ = {};
    const std::lock_guard lock(mutex_);
    failure_ = std::move(failure);
    ended_ = true;
    changed_.notify_all();
  }

  std::function<void()> work_;
  std::mutex mutex_;
  std::condition_variable changed_;
  bool ended_ = false;
  std::optional<Error> failure_;
};

// What a rank tells the others before the engines are made.
struct Offer {
  std::int32_t ready = 0;
  nccl::UniqueId id{};  // rank 0's
};

std::string why_not_here(const Comm& comm) {
  if (const char* reason = why_no_library(); *reason != '\0') return reason;
  if (comm.ranks_on_device() > 1) {
    return concat("NCCL needs a device for each rank, here ", comm.ranks_on_device(),
                  " ranks share one");
  }
  return "";
}

void require_ranks(const nccl::Functions& nccl, nccl::Comm lent, const Comm& comm) {
  int count = 0, rank = 0, device = 0;
  nccl.check(nccl.CommCount(lent, &count), "CommCount");
  nccl.check(nccl.CommUserRank(lent, &rank), "CommUserRank");
  nccl.check(nccl.CommCuDevice(lent, &device), "CommCuDevice");
  XD_REQUIRE(count == comm.num_ranks() && rank == comm.rank() && device == comm.device().device_id,
             "config.nccl_comm is rank ", rank, " of ", count, " on device ", device,
             ", expected rank ", comm.rank(), " of ", comm.num_ranks(), " on device ",
             comm.device().device_id);
}

}  // namespace

AttendedEngine::AttendedEngine(Comm& comm, const Config& config) : comm_(comm) {
  const auto offers = comm.collective().agree_on(kCreateContext, [&] {
    why_not_ = why_not_here(comm);
    Offer offer{.ready = why_not_.empty() ? 1 : 0, .id = {}};
    if (offer.ready != 0 && config.nccl_comm != nullptr) {
      require_ranks(library().nccl, config.nccl_comm, comm);
    }
    if (offer.ready != 0 && config.nccl_comm == nullptr && comm.rank() == 0) {
      library().nccl.check(library().nccl.GetUniqueId(&offer.id), "GetUniqueId");
    }
    return offer;
  });
  for (std::size_t r = 0; r < offers.size() && why_not_.empty(); ++r) {
    if (offers[r].ready == 0) why_not_ = concat("rank ", r, " cannot use cuBLASMp");
  }
  if (!why_not_.empty() && config.allow_fallback) return;
  const Ranks ranks{.count = comm.num_ranks(),
                    .rank = comm.rank(),
                    .lent = config.nccl_comm,
                    .id = offers.front().id};
  // Those that have an engine where another rank has none end theirs.
  try {
    comm.collective().agree(kCreateContext, [&] {
      if (!why_not_.empty()) fail(XD_ERROR_UNSUPPORTED, why_not_);
      make(config, ranks);
      return Collective::Contribution{};
    });
  } catch (...) {
    end();
    throw;
  }
  watch_ = start_thread("xd-cublasmp", [this] { watch(); });
}

void AttendedEngine::make(const Config& config, const Ranks& ranks) {
  const auto made = std::make_shared<std::unique_ptr<Engine>>();
  const bool ended = Errand::run(
      [made, config, ranks, device = comm_.device().device_id] {
        const xd::cuda::DeviceGuard guard(device);
        const xd::cuda::DeviceBuffer matrices(device, Engine::small_bytes(config),
                                              "operands of small products");
        xd::cuda::Stream stream(device);
        const cudaStream_t used = stream.get();
        auto engine = std::make_unique<Engine>(library(), config, ranks, std::move(stream));
        engine->enqueue_small(matrices.data());
        XD_CUDA_CHECK(cudaStreamSynchronize(used));
        *made = std::move(engine);
      },
      comm_.deadline());
  if (!ended) fail(XD_ERROR_TIMEOUT, "NCCL and cuBLASMp did not connect the ranks in time");
  engine_ = std::move(*made);
}

// A rank that is lost, a timeout or an abort: products that wait for their peers end, and so does
// the stream that the caller may be waiting for.
void AttendedEngine::watch() {
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, kLookAgain, [this] { return ends_; })) {
    if (comm_.errors().fatal_error() == nullptr) continue;
    engine_->abort();
    return;
  }
}

AttendedEngine::~AttendedEngine() {
  if (watch_.joinable() && xd::cuda::usable_in_this_process()) {
    {
      const std::lock_guard lock(mutex_);
      ends_ = true;
    }
    changed_.notify_all();
    watch_.join();
  } else if (watch_.joinable()) {
    watch_.detach();  // a fork, which has no such thread
  }
  end();
}

void AttendedEngine::end() noexcept {
  if (engine_ == nullptr) return;
  bool ended = false;
  try {
    if (xd::cuda::usable_in_this_process()) {
      if (comm_.errors().fatal_error() != nullptr) engine_->abort();
      ended = Errand::run(
          [engine = engine_.get(), device = comm_.device().device_id] {
            xd::cuda::try_on_device(device, [&] { engine->release(); });
          },
          Deadline::after_ms(kPatienceMs));
      if (!ended) {
        log_warning("cuBLASMp waits for ranks that have not destroyed their contexts [rank ",
                    comm_.rank(), " of ", comm_.num_ranks(),
                    "]: it is kept until the process ends");
      }
    }
  } catch (...) {  // no memory for a thread
  }
  if (ended) return engine_.reset();
  // Found from here, so that it is not lost. Its end may be under way, or cannot be.
  static std::atomic<Engine*> kept{nullptr};
  Engine* const one = engine_.release();
  one->next_kept = kept.load();
  while (!kept.compare_exchange_weak(one->next_kept, one)) {
  }
}

}  // namespace xd::gemm::cublasmp
