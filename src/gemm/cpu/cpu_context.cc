#include <chrono>
#include <optional>
#include <utility>

#include "base/error.h"
#include "base/float_modes.h"
#include "gemm/cpu/limits.h"
#include "gemm/cpu/onednn.h"
#include "gemm/cpu/operations.h"
#include "gemm/cpu/plan.h"
#include "gemm/executors.h"
#include "turn/host/runner.h"

namespace xd::gemm::cpu {
namespace {

// Calls oneDNN once for each way in which operands may lie, large and small, so that no operation
// waits for code to be generated. Returns the floating-point operations that it does in a
// microsecond.
template <class Element>
double measure(const Scratch& scratch, Element one) {
  constexpr std::int64_t kSmall = 2, kSize = 128;
  auto* const a = reinterpret_cast<Element*>(scratch.a_panel());
  auto* const b = reinterpret_cast<Element*>(scratch.b_panel());
  std::fill_n(a, kSize * kSize, one);
  std::fill_n(b, kSize * kSize, one);
  Gemm<Element> product{.transpose_a = 'N',
                        .transpose_b = 'T',
                        .m = kSize,
                        .n = kSize,
                        .k = kSize,
                        .a = a,
                        .lda = kSize,
                        .b = b,
                        .ldb = kSize,
                        .beta = 0.0f,
                        .c = scratch.tile(),
                        .ldc = kSize};
  for (const std::int64_t size : {kSmall, kSize}) {
    product.m = product.n = product.k = size;
    for (const float beta : {0.0f, 1.0f}) {
      product.beta = beta;
      for (const auto& [transpose_a, transpose_b] : {std::pair{'N', 'N'}, {'T', 'N'}, {'N', 'T'}}) {
        product.transpose_a = transpose_a;
        product.transpose_b = transpose_b;
        run(product);
      }
    }
  }
  const auto begin = std::chrono::steady_clock::now();
  run(product);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  return 2.0 * kSize * kSize * kSize / std::max(1.0, took.count());
}

class CpuContext final : public Context {
 public:
  CpuContext(std::shared_ptr<Comm> comm, const xd_gemm_config* config)
      : Context(std::move(comm), config),
        threads_(cores_per_rank(static_cast<int>(near().size()))),
        lockstep_(*this) {
    this->comm().collective().agree(kCreateContext, [this] {
      require_memory();
      if (!onednn_feature().available) fail(XD_ERROR_UNSUPPORTED, onednn_feature().reason);
      if (this->config().is_for_cublasmp() && !this->config().allow_fallback) {
        fail(XD_ERROR_UNSUPPORTED,
             "config.algo or config.nccl_comm asks for cuBLASMp, which needs CUDA devices");
      }
      scratch_.emplace(this->config());
      multiplier_.emplace(scratch_->panels());
      require_limits(threads_);
      const StandardFloatModes modes;
      const Threads threads(threads_);
      flops_ = bf16_flops_ = measure(*scratch_, 1.0f);
      if (multiplies_bf16()) bf16_flops_ = measure(*scratch_, Bf16::one);
      return Collective::Contribution{};
    });
  }

  void product(xd_gemm_operation operation, const xd_gemm_args* args, xd_stream) override {
    const Working working(*this);
    const auto read = [&](auto make) {
      const ProductCall call = read_product(operation, args, call_context(scratch_->starts()));
      return make(call, choose(config(), call));
    };
    if (operation == XD_GEMM_ALL_GATHER) {
      Gathered gathered;
      runner_.run(operation, [&] {
        return read([&](const ProductCall& call, xd_gemm_algo algo) {
          AllGatherOp op(tools(), call, algo);
          gathered = op.gathered();
          return op;
        });
      });
      if (config().keep_gathered) kept_ = gathered;
      return;
    }
    runner_.run(operation, [&] {
      return read([&](const ProductCall& call, xd_gemm_algo) { return ReduceOp(tools(), call); });
    });
  }

  void bulk(const xd_gemm_bulk_args* args, xd_stream) override {
    const Working working(*this);
    runner_.run(XD_GEMM_BULK, [&] {
      return TransferOp(tools(), read_bulk(args, call_context(scratch_->starts())));
    });
  }

  void start_all_gather(const xd_gemm_gather_args* args, xd_stream) override {
    if (begun_) {
      give_back(
          {.status = XD_ERROR_BUSY,
           .text = "a gather is under way, expected xd_gemm_wait before the next one; peers do "
                   "not hear of this call",
           .rank = rank()},
          XD_GEMM_START_ALL_GATHER, 0);
    }
    const Working working(*this);
    comm().errors().check_usable();
    begun_ = true;
    runner_.start(XD_GEMM_START_ALL_GATHER, gather_, [&] {
      return TransferOp(tools(), read_gather(args, call_context(scratch_->starts())));
    });
  }

  void wait(xd_stream) override {
    comm().errors().check_usable();
    if (!begun_) return;
    const Working working(*this, Working::Join::none);
    runner_.settle(finish_gather(), XD_GEMM_START_ALL_GATHER);
  }

  xd_gemm_view gathered() override {
    XD_REQUIRE(kept_,
               "context: keeps no rows, expected config.keep_gathered = 1 and all_gather as the "
               "last operation");
    xd_gemm_view view XD_GEMM_VIEW_INIT;
    view.data = kept_->data;
    view.rows = kept_->rows;
    view.columns = kept_->columns;
    view.pitch_bytes = at(kept_->columns) * dtype_bytes(kept_->type);
    view.dtype = dl_dtype(kept_->type);
    return view;
  }

  const volatile std::uint64_t* watch() const override { return runner_.watch(); }

 protected:
  void take_failed_turn(std::int32_t operation, Error&& error, xd_stream) override {
    const Working working(*this);
    runner_.run_failed(operation, std::move(error));
  }

  xd_gemm_plan_info plan_of(const ProductCall& call) const override {
    return cpu::explain(config(), call, call.a.type == DType::bf16 ? bf16_flops_ : flops_);
  }

 private:
  // Around every operation: the thread's float modes and threads, and the gather that was begun
  // before.
  class Working {
   public:
    enum class Join { gather, none };
    explicit Working(CpuContext& context, Join join = Join::gather) : threads_(context.threads_) {
      context.kept_.reset();
      if (join == Join::gather && context.begun_) {
        context.runner_.keep(context.finish_gather(), XD_GEMM_START_ALL_GATHER);
      }
    }

   private:
    const StandardFloatModes modes_;
    const Threads threads_;
  };

  OperationError finish_gather() {
    begun_ = false;
    OperationError operation_error = runner_.finish(XD_GEMM_START_ALL_GATHER, gather_);
    gather_.reset();
    return operation_error;
  }
  Tools tools() { return {*this, lockstep_, *scratch_, *multiplier_}; }

  const int threads_;  // the most that a product may use
  Lockstep lockstep_;
  std::optional<Scratch> scratch_;
  std::optional<Multiplier> multiplier_;
  double flops_ = 0, bf16_flops_ = 0;
  turn::HostRunner<Family> runner_{*this, lockstep_, false};
  bool begun_ = false;  // a gather: its turn has not ended
  std::optional<TransferOp> gather_;
  std::optional<Gathered> kept_;  // the rows that xd_gemm_gathered describes
};

std::unique_ptr<Context> make_context(std::shared_ptr<Comm> comm, const xd_gemm_config* config) {
  return std::make_unique<CpuContext>(std::move(comm), config);
}

xd_gemm_memory context_memory(const Config& config) {
  xd_gemm_memory memory XD_GEMM_MEMORY_INIT;
  memory.symmetric_bytes = Map::make(config).end;
  memory.private_bytes = Scratch::bytes(config);
  return memory;
}

}  // namespace

const Executor kExecutor{.device_type = kDLCPU,
                         .make_context = make_context,
                         .context_memory = context_memory,
                         .availability = onednn_feature};

}  // namespace xd::gemm::cpu
