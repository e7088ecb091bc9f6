#include "gemm/cublasmp/attended_engine.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <utility>

#include "base/error.h"
#include "cuda/device.h"
#include "cuda/error.h"
#include "cuda/memory.h"
#include "cuda/stream.h"
#include "gemm/cublasmp/errand.h"

namespace xd::gemm::cublasmp {
namespace {

// The facts that a rank tells the others before the engines are made.
struct Offer {
  std::int32_t ready = 0;
  nccl::UniqueId id{};  // rank 0's
};

std::string why_not_here(const Comm& comm, const Config& config) {
  if (const char* reason = why_no_library(); *reason != '\0') return reason;
  if (comm.ranks_on_device() > 1) {
    return concat("NCCL needs a device for each rank, here ", comm.ranks_on_device(),
                  " ranks share one");
  }
  return config.nccl_comm != nullptr ? why_not_lent(library()) : "";
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

// By events, which are found by whoever asks.
class EventMarks final : public Marks {
 public:
  // Called with the device current.
  explicit EventMarks(int device) : device_(device), begin_(device), end_(device) {}

  void begin(cudaStream_t stream) override { XD_CUDA_CHECK(cudaEventRecord(begin_.get(), stream)); }
  void end(cudaStream_t stream) override { XD_CUDA_CHECK(cudaEventRecord(end_.get(), stream)); }
  bool begun() const noexcept override { return has_come(begin_); }
  bool ended() const noexcept override { return has_come(end_); }

 private:
  // An error of the device ends everything.
  bool has_come(const xd::cuda::Event& event) const noexcept {
    bool come = true;
    xd::cuda::try_on_device(device_, [&] {
      come = cudaEventQuery(event.get()) != cudaErrorNotReady;
      cudaGetLastError();  // not an error, but recorded as one
    });
    return come;
  }

  const int device_;
  const xd::cuda::Event begin_, end_;
};

// The making of an engine, which outlives a rank that gives it up.
class Start {
 public:
  Start(int device, const Config& config) : device_(device), config_(config) {}

  // NCCL connects ranks when they first need it, so small products run before any call.
  void run(const Ranks& ranks) {
    const xd::cuda::DeviceGuard guard(device_);
    matrices_ =
        xd::cuda::DeviceBuffer(device_, Engine::small_bytes(config_), "operands of small products");
    xd::cuda::Stream stream(device_);
    stream_ = stream.get();
    publish(std::make_shared<Engine>(library(), config_, ranks, std::move(stream)));
    try {
      if (given_up_) fail(XD_ERROR_TIMEOUT, "nobody waits for it any more");
      engine_->enqueue_small(matrices_.data());
      while (!is_idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      XD_CUDA_CHECK(cudaStreamSynchronize(stream_));  // for its error
    } catch (...) {
      engine_->stop();
      throw;
    }
  }
  // True if nothing of it runs any more. An error of the device ends everything.
  bool is_idle() const {
    const xd::cuda::DeviceGuard guard(device_);
    if (stream_ == nullptr) return true;
    const bool idle = cudaStreamQuery(stream_) != cudaErrorNotReady;
    cudaGetLastError();  // not an error, but recorded as one
    return idle;
  }
  // One that is made later ends at once. Any thread.
  void give_up() { given_up_ = true; }
  // nullptr = it has not been made yet. Any thread.
  std::shared_ptr<Engine> engine() const {
    const std::lock_guard lock(mutex_);
    return engine_;
  }

 private:
  void publish(std::shared_ptr<Engine> engine) {
    const std::lock_guard lock(mutex_);
    engine_ = std::move(engine);
  }

  const int device_;
  const Config config_;
  xd::cuda::DeviceBuffer matrices_;
  cudaStream_t stream_ = nullptr;
  std::atomic<bool> given_up_{false};
  mutable std::mutex mutex_;
  std::shared_ptr<Engine> engine_;
};

// Ends what has been made of an engine that is not to be. Small products may run, and wait for
// ranks that do not come: nothing that they use is freed unless they have ended.
void abandon(const std::shared_ptr<Start>& start) noexcept {
  start->give_up();
  try {
    const bool ended = Errand::run(
        [start] {
          const std::shared_ptr<Engine> engine = start->engine();
          if (engine == nullptr) return;
          engine->stop();
          while (!start->is_idle()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
          engine->give_up();
        },
        Deadline::after_ms(Attendant::kPatienceMs));
    if (ended) return;
  } catch (...) {  // no memory for a thread
  }
  keep_for_good(start);
}

std::unique_ptr<Attendant> make(Comm& comm, const Config& config, const Ranks& ranks) {
  const int device = comm.device().device_id;
  const auto start = std::make_shared<Start>(device, config);
  try {
    const bool ended = Errand::run([start, ranks] { start->run(ranks); }, comm.deadline(),
                                   [&comm] { comm.errors().throw_if_failed(); });
    if (!ended) fail(XD_ERROR_TIMEOUT, "NCCL and cuBLASMp did not connect the ranks in time");
    return std::make_unique<Attendant>(comm, start->engine(),
                                       [device] { return std::make_unique<EventMarks>(device); });
  } catch (...) {
    abandon(start);
    throw;
  }
}

}  // namespace

AttendedEngine::AttendedEngine(Comm& comm, const Config& config) {
  const auto offers = comm.collective().agree_on(kCreateContext, [&] {
    why_not_ = why_not_here(comm, config);
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
  // Ranks that have an engine where another rank has none end theirs.
  comm.collective().agree(kCreateContext, [&] {
    if (!why_not_.empty()) fail(XD_ERROR_UNSUPPORTED, why_not_);
    attendant_ = make(comm, config, ranks);
    return Collective::Contribution{};
  });
}

}  // namespace xd::gemm::cublasmp
