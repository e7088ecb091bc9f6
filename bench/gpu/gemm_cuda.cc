#include "gemm_cuda.h"

#include <optional>
#include <span>
#include <string>

#include "../report.h"
#include "machine.h"
#include "nccl.h"
#include "product_floor.h"
#include "rank.h"

namespace bench::gpu {
namespace {

// By cuBLASLt and NCCL.
class CudaSteps : public GemmSteps {
 public:
  CudaSteps(const GemmProblem& p, const Means& means, const GemmTensors& tensors, bool has_nccl)
      : p_(p),
        at_(means.at),
        t_(tensors),
        floor_(p,
               {.a = (p.gathers() ? tensors.whole : tensors.a).data(),
                .b = tensors.b.data(),
                .d = (p.gathers() ? tensors.d : tensors.whole).data()},
               means.stream) {
    if (has_nccl) nccl_.emplace(at_);
  }

  bool has_transfer() const override { return nccl_.has_value(); }
  // NCCL rounds its sums after every addition, in its own order.
  Sums sums() const override { return Sums::rounded_each_time; }
  void product() override { floor_.enqueue(); }
  // NCCL's shares are equal: run_gemm() sees to that.
  void transfer() override {
    const auto n = static_cast<std::size_t>(p_.shape.n), k = static_cast<std::size_t>(p_.shape.k);
    const auto all = static_cast<std::size_t>(p_.tokens);
    const std::size_t share = all / static_cast<std::size_t>(p_.ranks);
    if (p_.gathers()) {
      nccl_->all_gather(t_.a.data(), t_.whole.data(), share * k, p_.element);
    } else if (p_.scatters()) {
      nccl_->reduce_scatter(t_.whole.data(), t_.d.data(), share * n, p_.element);
    } else {
      nccl_->all_reduce(t_.whole.data(), t_.d.data(), all * n, p_.element);
    }
  }

  void choose() override {
    std::int32_t best = 0;
    double least = 0;
    for (int i = 0; i < floor_.candidates(); ++i) {
      floor_.choose(i);
      const std::vector<double> slowest = at_.time({2, 6}, [&](int) { product(); });
      if (at_.rank != 0) continue;
      const double p50 = percentile(slowest, 0.5);
      if (i == 0 || p50 < least) {
        best = i;
        least = p50;
      }
    }
    at_.broadcast(std::as_writable_bytes(std::span(&best, 1)));
    floor_.choose(best);
  }

 private:
  const GemmProblem& p_;
  const Rank& at_;
  const GemmTensors& t_;
  ProductFloor floor_;
  std::optional<NcclCollectives> nccl_;
};

}  // namespace

Json describe_gemm() {
  return {{"gpus", to_json(describe_gpus())},
          {"nccl", nccl_state().unavailable.empty() ? nccl_state().version
                                                    : "skipped: " + nccl_state().unavailable}};
}

GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem) {
  const Place place = place_ranks(launch);
  const int device = place.device_of(rank);
  ok(cudaSetDevice(device), "cudaSetDevice");
  load_gate();
  const bool has_nccl = launch.num_ranks > 1 && !place.shares_devices() &&
                        problem.tokens % launch.num_ranks == 0 && nccl_state().unavailable.empty();
  const std::string name = "bench-gemm-" + problem.shape.name + std::to_string(problem.tokens);
  const Means means(launch, rank,
                    {.name = name.c_str(),
                     .heap_bytes = Means::heap_bytes(),
                     .device = {kDLCUDA, device},
                     .unique_id = nullptr,
                     .timeout_ms = kTimeoutMs},
                    0, Pool::open);
  return measure_gemm(problem, means.at, nullptr,
                      [&](const GemmTensors& tensors, xd_gemm_context*) {
                        return std::make_unique<CudaSteps>(problem, means, tensors, has_nccl);
                      });
}

}  // namespace bench::gpu
