// A context on CUDA devices: its memory, its choices, and the turns of its calls.
#pragma once

#include <memory>
#include <optional>
#include <vector>

#include "cuda/known_memory.h"
#include "cuda/memory.h"
#include "gemm/context.h"
#include "gemm/cublasmp/attended_engine.h"
#include "gemm/cublasmp/kinds.h"
#include "gemm/cuda/meeting.h"
#include "gemm/cuda/operations.h"
#include "gemm/cuda/peer_mapped_cells.h"
#include "gemm/cuda/started_gather.h"
#include "turn/device/runner.h"

namespace xd::gemm::cuda {

class CudaContext final : public Context {
 public:
  CudaContext(std::shared_ptr<Comm> comm, const xd_gemm_config* config);
  ~CudaContext() override;

  void product(xd_gemm_operation operation, const xd_gemm_args* args, xd_stream stream) override;
  void bulk(const xd_gemm_bulk_args* args, xd_stream stream) override;
  void start_all_gather(const xd_gemm_gather_args* args, xd_stream stream) override;
  void wait(xd_stream stream) override;
  xd_gemm_view gathered() override;

  xd_gemm_status take_status() override {
    runner_.collect();
    return Context::take_status();
  }
  const volatile std::uint64_t* watch() const override { return runner_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream stream) override {
    run(operation, stream, [&] { throw std::move(error); });
  }
  xd_gemm_plan_info plan_of(const ProductCall& call) const override;

 private:
  using Runner = turn::DeviceRunner<Family, Control, Report>;

  // All that kernels may touch, and what they are launched with.
  struct Memory {
    std::shared_ptr<Comm> comm;
    Segments segments;
    std::unique_ptr<PeerMappedCells> cells;
    xd::cuda::DeviceBuffer tables, scratch, exact, ones, scales, block_scales;
    std::unique_ptr<Products> products;
    std::unique_ptr<SideStream> side;
    std::unique_ptr<Meeting> meeting;
    Runner::Memory of_turns;
    Memory* next = nullptr;
  };

  void keep_for_good() noexcept;
  void allocate();
  void fill_ones(int device);
  void empty_words() const;
  void describe();
  void describe_cells();
  void tune();
  void warm_up();

  void require_order(std::int32_t operation, xd_stream stream);
  template <class Start>
  void run(std::int32_t operation, xd_stream stream, Start&& start) {
    require_order(operation, stream);
    kept_ = XD_GEMM_VIEW_INIT;  // peers may store rows of theirs over those that are kept
    runner_.run(operation, stream, std::forward<Start>(start));
  }
  void begin(const TurnParams& turn, xd_stream stream);
  void end(xd_stream stream);
  template <class Work>
  void enqueue(const EnqueuedTurn& turn, xd_stream stream, Work&& work);
  void fail_turn(const turn::Call& call, std::uint32_t launch, xd_stream stream);
  void start(const ProductCall& call, xd_stream stream, bool& entered);
  // False if cuBLASMp refuses the product on all ranks. D is undefined then: a part of the product
  // may have been enqueued, and is looked after like a whole one.
  bool start_by_cublasmp(const ProductCall& call, const Option& option, xd_stream stream,
                         bool& entered);
  bool meet_and_enqueue(const ProductCall& call, const Option& option, const EnqueuedTurn& turn,
                        xd_stream stream, bool& entered);
  cublasmp::TakenBy enqueue_by_cublasmp(const ProductCall& call, const Option& option,
                                        const EnqueuedTurn& turn, std::uint64_t epoch,
                                        xd_stream stream, bool& entered);
  // The reason why cuBLASMp cannot take the call; empty if it can.
  std::string cublasmp_obstacle(const ProductCall& call) const;
  void keep(const ProductCall& call, DLDataType type);
  Problem problem(const ProductCall& call) const;
  // `hinders_cublasmp`: what of the call's stream does.
  Option choose(const ProductCall& call, const char* hinders_cublasmp = "") const;
  TurnParams turn_params(const Record& record, std::uint32_t launch) const {
    return {.group = shop_.group, .launch = launch, .record = record};
  }
  EnqueuedTurn next_turn(const Record& record, bool& entered) {
    return {turn_params(record, runner_.next_launch()), entered};
  }

  const Machine machine_{};
  // Looked up here, since the first look of a process allocates, which no operation may.
  xd::cuda::KnownMemory& known_memory_;
  std::unique_ptr<Memory> memory_ = std::make_unique<Memory>();
  Workshop shop_;
  std::vector<std::int64_t> starts_;
  std::unique_ptr<StartedGather> gather_;
  std::optional<cudaStream_t> last_;  // stream of the last operation, if it was not captured
  bool captured_ = false;             // some operation was
  // True if the last operation's turn was a meeting, and nothing behind it reads its epoch.
  bool met_ = false;
  xd_gemm_view kept_ = XD_GEMM_VIEW_INIT;               // data = nullptr: nothing
  std::unique_ptr<cublasmp::AttendedEngine> cublasmp_;  // nullptr = the context is not made for it
  cublasmp::Kinds kinds_;
  Runner runner_;
};

}  // namespace xd::gemm::cuda
