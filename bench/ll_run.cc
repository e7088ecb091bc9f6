#include "ll_run.h"

#include <sys/mman.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <stdexcept>

#include "group_config.h"
#include "routing.h"
#include "tensor.h"
#include "timing.h"

namespace bench {
namespace {

constexpr DLDataType kBf16{kDLBfloat, 16, 1}, kE4m3{10, 8, 1}, kF32{kDLFloat, 32, 1};
constexpr const char* kLowLatency = "low latency";
constexpr const char* kZeroCopy = "zero-copy";
constexpr const char* kStaged = "staged";

enum Step : std::size_t {
  kDispatch,
  kDispatchFp8,
  kCombine,
  kBoth,
  kSendDispatch,
  kHalvesOfDispatch,
  kSendCombine,
  kHalvesOfCombine,
  kPrepare,
  kLandedDispatch,
  kLandedCombine,
  kLandedAll,
  kStagedDispatch,
  kStagedCombine,
  kStagedAll,
};
constexpr std::array<LlStep, kStagedAll + 1> kSteps{{
    {"dispatch", kLowLatency, "bf16", "call"},
    {"dispatch", kLowLatency, "fp8", "call"},
    {"combine", kLowLatency, "bf16", "call"},
    {"dispatch + combine", kLowLatency, "bf16", "call"},
    {"dispatch, send half", kLowLatency, "bf16", "call"},
    {"dispatch, both halves", kLowLatency, "bf16", "call"},
    {"combine, send half", kLowLatency, "bf16", "call"},
    {"combine, both halves", kLowLatency, "bf16", "call"},
    {"prepare", kZeroCopy, "-", "call"},
    {"dispatch", kZeroCopy, "bf16", "call"},
    {"combine", kZeroCopy, "bf16", "call"},
    {"prepare + dispatch + combine", kZeroCopy, "bf16", "call"},
    {"dispatch", kStaged, "bf16", "call"},
    {"combine", kStaged, "bf16", "call"},
    {"prepare + dispatch + combine", kStaged, "bf16", "call"},
}};

// A tensor [L,S,columns]. Only pages of rows that arrive are ever touched, so that it takes less
// memory than its size.
class SlotTensor {
 public:
  SlotTensor(DLDataType type, const std::array<std::int64_t, 3>& shape)
      : bytes_(static_cast<std::size_t>(shape[0] * shape[1] * shape[2]) * type.bits / 8),
        shape_(shape) {
    data_ = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (data_ == MAP_FAILED) throw std::runtime_error("no address space for slots");
    tensor_ = {data_, {kDLCPU, 0}, 3, type, shape_.data(), nullptr, 0};
  }
  ~SlotTensor() { ::munmap(data_, bytes_); }
  SlotTensor(const SlotTensor&) = delete;
  SlotTensor& operator=(const SlotTensor&) = delete;
  const DLTensor* dl() const { return &tensor_; }
  std::size_t row_bytes() const {
    return static_cast<std::size_t>(shape_[2]) * tensor_.dtype.bits / 8;
  }
  std::byte* row(std::int64_t expert, std::int64_t slot) const {
    return static_cast<std::byte*>(data_) +
           static_cast<std::size_t>(expert * shape_[1] + slot) * row_bytes();
  }

 private:
  std::size_t bytes_;
  std::array<std::int64_t, 3> shape_;
  void* data_;
  DLTensor tensor_{};
};

// Treats a row as experts do that return their rows unchanged: its rank has read it and written it,
// so that it lies in that rank's caches, in no other's.
void compute(std::byte* row, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < bytes; i += kLine) {
    auto* const byte = reinterpret_cast<volatile unsigned char*>(row + i);
    *byte = *byte;
  }
}

// Memory that begins at a multiple of 64 bytes.
class PlanMemory {
 public:
  explicit PlanMemory(std::size_t bytes) : units_((bytes + sizeof(Unit) - 1) / sizeof(Unit)) {}
  template <class Args>
  Args in(Args args) {
    args.plan = units_.data();
    args.plan_bytes = units_.size() * sizeof(Unit);
    return args;
  }

 private:
  struct alignas(64) Unit {
    std::byte bytes[64];
  };
  std::vector<Unit> units_;
};

LlGroup make_group(xd_comm* comm, const xd_ll_config& config) {
  xd_ll_group* group = nullptr;
  ok(xd_ll_group_create(comm, &config, &group));
  return LlGroup(group);
}

Group make_group(xd_comm* comm, const xd_ep_config& config) {
  xd_ep_group* group = nullptr;
  ok(xd_ep_group_create(comm, &config, &group));
  return Group(group);
}

std::size_t plan_size(const xd_ep_config& config) {
  std::size_t bytes = 0;
  ok(xd_ep_plan_size(&config, &bytes));
  return bytes;
}

std::size_t plan_size(const xd_ll_config& config) {
  std::size_t bytes = 0;
  ok(xd_ll_plan_size(&config, &bytes));
  return bytes;
}

xd_ll_config slots_config(const Workload& w) {
  xd_ll_config config = XD_LL_CONFIG_INIT;
  config.num_ranks = w.ranks;
  config.num_experts = w.experts;
  config.max_topk = w.topk;
  config.max_tokens_per_rank = std::max(w.tokens, 1);
  config.hidden = w.hidden;
  config.dtype = kBf16;
  return config;
}

// The tensors of a rank that all ways take.
struct Tokens {
  Matrix topk_idx, tokens;
  Tokens(const Workload& w, int rank, xd_comm* comm, const Traffic& traffic)
      : topk_idx(nullptr, {kDLInt, 32, 1}, {w.tokens, w.topk}),
        tokens(comm, kBf16, {w.tokens, w.hidden}) {
    std::copy(traffic.choices.begin(), traffic.choices.end(),
              static_cast<std::int32_t*>(topk_idx.data()));
    fill_tokens(w, rank, tokens.data());
  }
};

// The experts return their rows unchanged, in their place, here and below.
class LowLatency {
 public:
  LowLatency(const Workload& w, xd_comm* comm, const Tokens& in)
      : config_(slots_config(w)),
        group_(make_group(comm, config_)),
        plan_(plan_size(config_)),
        slots_(std::int64_t{w.ranks} * config_.max_tokens_per_rank),
        recv_(kBf16, {w.local_experts(), slots_, w.hidden}),
        recv_fp8_(kE4m3, {w.local_experts(), slots_, w.hidden}),
        scales_(kF32, {w.local_experts(), slots_, w.hidden / 128}),
        counts_(nullptr, {kDLInt, 32, 1}, {w.local_experts(), 1}),
        counts_tensor_(*counts_.dl()),
        out_(nullptr, kBf16, {w.tokens, w.hidden}) {
    counts_tensor_.ndim = 1;
    dispatch_ = plan_.in(xd_ll_dispatch_args XD_LL_DISPATCH_ARGS_INIT);
    dispatch_.tokens = in.tokens.dl();
    dispatch_.topk_idx = in.topk_idx.dl();
    dispatch_.recv_tokens = recv_.dl();
    dispatch_.counts = &counts_tensor_;
    combine_ = plan_.in(xd_ll_combine_args XD_LL_COMBINE_ARGS_INIT);
    combine_.expert_out = recv_.dl();
    combine_.out = out_.dl();
  }

  void dispatch(xd_ll_phase phase = XD_LL_PHASE_BOTH) {
    dispatch_.phase = phase;
    ok(xd_ll_dispatch(group_.get(), &dispatch_, nullptr));
  }
  void dispatch_fp8() {
    xd_ll_dispatch_args args = dispatch_;
    args.phase = XD_LL_PHASE_BOTH;
    args.quantise = XD_EP_QUANTISE_FP8_BLOCK128;
    args.recv_tokens = recv_fp8_.dl();
    args.recv_scales = scales_.dl();
    ok(xd_ll_dispatch(group_.get(), &args, nullptr));
  }
  void experts() const { compute_all(recv_); }
  void experts_fp8() const { compute_all(recv_fp8_); }
  void combine(xd_ll_phase phase = XD_LL_PHASE_BOTH) {
    combine_.phase = phase;
    ok(xd_ll_combine(group_.get(), &combine_, nullptr));
  }
  const Matrix& out() const { return out_; }

 private:
  void compute_all(const SlotTensor& recv) const {
    const auto* const counts = static_cast<const std::int32_t*>(counts_.data());
    for (std::int64_t expert = 0; expert < counts_tensor_.shape[0]; ++expert) {
      for (std::int64_t slot = 0; slot < counts[expert]; ++slot) {
        compute(recv.row(expert, slot), recv.row_bytes());
      }
    }
  }

  const xd_ll_config config_;
  const LlGroup group_;
  PlanMemory plan_;
  const std::int64_t slots_;
  const SlotTensor recv_, recv_fp8_, scales_;
  const Matrix counts_;
  DLTensor counts_tensor_;  // [L]
  const Matrix out_;
  xd_ll_dispatch_args dispatch_ = XD_LL_DISPATCH_ARGS_INIT;
  xd_ll_combine_args combine_ = XD_LL_COMBINE_ARGS_INIT;
};

// The same through the layout that has one row per expert as well; what it receives lies in
// symmetric memory or, where `staged`, in ordinary memory.
class Landed {
 public:
  Landed(const Workload& w, xd_comm* comm, const Tokens& in, const Traffic& traffic, bool staged)
      : config_(group_config(w, traffic, kBf16, staged)),
        group_(make_group(comm, config_)),
        plan_(plan_size(config_)),
        in_(in),
        recv_bytes_(static_cast<std::size_t>(traffic.recv_rows) * w.row_bytes()),
        recv_(staged ? nullptr : comm, kBf16, {traffic.recv_capacity, w.hidden}),
        out_(staged ? nullptr : comm, kBf16, {w.tokens, w.hidden}) {}

  void prepare() {
    auto args = plan_.in(xd_ep_prepare_args XD_EP_PREPARE_ARGS_INIT);
    args.topk_idx = in_.topk_idx.dl();
    ok(xd_ep_prepare(group_.get(), &args, nullptr));
  }
  void dispatch() {
    auto args = plan_.in(xd_ep_dispatch_args XD_EP_DISPATCH_ARGS_INIT);
    args.tokens = in_.tokens.dl();
    args.recv_tokens = recv_.dl();
    ok(xd_ep_dispatch(group_.get(), &args, nullptr));
  }
  void experts() const { compute(static_cast<std::byte*>(recv_.data()), recv_bytes_); }
  void combine() {
    auto args = plan_.in(xd_ep_combine_args XD_EP_COMBINE_ARGS_INIT);
    args.expert_out = recv_.dl();
    args.out = out_.dl();
    ok(xd_ep_combine(group_.get(), &args, nullptr));
  }
  const Matrix& out() const { return out_; }

 private:
  const xd_ep_config config_;
  const Group group_;
  PlanMemory plan_;
  const Tokens& in_;
  const std::size_t recv_bytes_;  // of rows in use
  const Matrix recv_, out_;
};

class LlRun {
 public:
  LlRun(const Workload& w, int rank, xd_comm* comm)
      : w_(w),
        comm_(comm),
        traffic_(traffic_of(w, make_routing(w), rank)),
        timing_(comm, rank, w.ranks, timing_size(w)),
        in_(w, rank, comm, traffic_),
        ll_(w, comm, in_),
        landed_(w, comm, in_, traffic_, false),
        staged_(w, comm, in_, traffic_, true) {}

  static std::size_t heap_bytes(const Workload& w, int rank) {
    const auto rows = static_cast<std::size_t>(std::int64_t{2} * w.tokens +
                                               traffic_of(w, make_routing(w), rank).recv_capacity);
    return Timing::kHeapBytes + rows * w.row_bytes() + (std::size_t{1} << 20);
  }

  LlResults run() {
    for (int round = 0; round < kRounds; ++round) {
      timing_.take_round(round, kRounds);
      time_whole();
      timing_.measure(kPrepare, [&] { landed_.prepare(); });
      time_landed(landed_, {kLandedDispatch, kLandedCombine, kLandedAll});
      time_landed(staged_, {kStagedDispatch, kStagedCombine, kStagedAll});
      time_halves();
    }
    LlResults results;
    results.equal_bits = compare();
    std::vector<std::vector<double>> seconds = timing_.collect();
    for (std::size_t step = 0; step < seconds.size(); ++step) {
      results.times.push_back({kSteps[step], std::move(seconds[step])});
    }
    const xd_ll_config config = slots_config(w_);
    ok(xd_ll_group_memory(&config, &results.memory));
    return results;
  }

 private:
  static constexpr int kRounds = 5;
  static Timing::Size timing_size(const Workload& w) { return {kSteps.size(), w.iters, w.warmup}; }

  // Experts compute between dispatch and combine; their time does not count.
  void time_whole() {
    timing_.measure(
        kDispatch, [&] { ll_.dispatch(); }, [&] { ll_.experts(); });
    timing_.measure(
        kCombine, [&] { ll_.combine(); }, [&] { ll_.experts(); });
    timing_.measure(kBoth, {{[&] { ll_.dispatch(); }, [&] { ll_.experts(); }},
                            {[&] { ll_.combine(); }, [] {}}});
    timing_.measure(
        kDispatchFp8, [&] { ll_.dispatch_fp8(); }, [&] { ll_.experts_fp8(); });
  }
  void time_halves() {
    timing_.measure(
        kSendDispatch, [&] { ll_.dispatch(XD_LL_PHASE_SEND); },
        [&] {
          ll_.dispatch(XD_LL_PHASE_RECEIVE);
          ll_.experts();
        });
    timing_.measure(
        kHalvesOfDispatch,
        [&] {
          ll_.dispatch(XD_LL_PHASE_SEND);
          ll_.dispatch(XD_LL_PHASE_RECEIVE);
        },
        [&] { ll_.experts(); });
    timing_.measure(
        kSendCombine, [&] { ll_.combine(XD_LL_PHASE_SEND); },
        [&] {
          ll_.combine(XD_LL_PHASE_RECEIVE);
          ll_.experts();
        });
    timing_.measure(
        kHalvesOfCombine,
        [&] {
          ll_.combine(XD_LL_PHASE_SEND);
          ll_.combine(XD_LL_PHASE_RECEIVE);
        },
        [&] { ll_.experts(); });
  }
  struct LandedSteps {
    Step dispatch, combine, all;
  };
  void time_landed(Landed& landed, const LandedSteps& steps) {
    landed.prepare();
    timing_.measure(
        steps.dispatch, [&] { landed.dispatch(); }, [&] { landed.experts(); });
    timing_.measure(
        steps.combine, [&] { landed.combine(); }, [&] { landed.experts(); });
    timing_.measure(steps.all, {{[&] {
                                   landed.prepare();
                                   landed.dispatch();
                                 },
                                 [&] { landed.experts(); }},
                                {[&] { landed.combine(); }, [] {}}});
  }

  // True if on every rank all ways have the same result.
  bool compare() {
    const std::size_t bytes = static_cast<std::size_t>(w_.tokens) * w_.row_bytes();
    const bool equal = std::memcmp(ll_.out().data(), landed_.out().data(), bytes) == 0 &&
                       std::memcmp(ll_.out().data(), staged_.out().data(), bytes) == 0;
    return on_all_ranks(comm_, w_.ranks, equal);
  }

  const Workload& w_;
  xd_comm* const comm_;
  const Traffic traffic_;
  Timing timing_;  // first: see SharedBlock
  const Tokens in_;
  LowLatency ll_;
  Landed landed_, staged_;
};

}  // namespace

LlResults run_ll(const Launch& launch, int rank, const Workload& workload) {
  const std::string name = "bench-ll-" + std::to_string(workload.tokens);
  const Comm comm = make_comm(
      launch, rank, {.name = name.c_str(), .heap_bytes = LlRun::heap_bytes(workload, rank)});
  return LlRun(workload, rank, comm.get()).run();
}

}  // namespace bench
