#include "ll_run.h"

#include <array>
#include <cstring>
#include <utility>

#include "ll_calls.h"

namespace bench {
namespace {

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

// Treats rows as experts do that return their rows unchanged: their rank has read them and written
// them, so that they lie in that rank's caches, in no other's.
void compute(void* rows, std::size_t bytes) {
  constexpr std::size_t kLine = 64;
  for (std::size_t i = 0; i < bytes; i += kLine) {
    auto* const byte = static_cast<volatile unsigned char*>(rows) + i;
    *byte = *byte;
  }
}

// Of slots [L,S,H], those that are filled.
void compute(const Tensor& slots, const Tensor& counts) {
  const DLTensor& all = *slots.dl();
  const std::size_t row_bytes = static_cast<std::size_t>(all.shape[2]) * all.dtype.bits / 8;
  const auto zone_bytes = static_cast<std::size_t>(all.shape[1]) * row_bytes;
  for (std::int64_t expert = 0; expert < all.shape[0]; ++expert) {
    const auto rows = static_cast<const std::int32_t*>(counts.data())[expert];
    compute(static_cast<std::byte*>(all.data) + static_cast<std::size_t>(expert) * zone_bytes,
            static_cast<std::size_t>(rows) * row_bytes);
  }
}

// Of [N,H], those before the end.
void compute_rows(const Tensor& rows, const Tensor& offsets) {
  const DLTensor& all = *rows.dl();
  const auto* const ends = static_cast<const std::int64_t*>(offsets.data());
  compute(all.data, static_cast<std::size_t>(ends[offsets.dl()->shape[0] - 1]) *
                        static_cast<std::size_t>(all.shape[1]) * all.dtype.bits / 8);
}

class LlRun {
 public:
  LlRun(const Workload& w, const Traffic& traffic, const Rank& at)
      : w_(w),
        at_(at),
        in_(w, traffic, at.comm, host()),
        ll_(w, at, in_),
        landed_(w, traffic, in_, at.comm, host(), false),
        staged_(w, traffic, in_, at.comm, host(), true),
        seconds_(kSteps.size()) {
    fill_tokens(w, at.rank, in_.tokens.data());
    landed_.open();
    staged_.open();
  }

  LlResults run() {
    for (round_ = 0; round_ < kRounds; ++round_) {
      time_whole();
      time(kPrepare, {call(landed_, Operation::prepare)});
      time_landed(landed_, {kLandedDispatch, kLandedCombine, kLandedAll});
      time_landed(staged_, {kStagedDispatch, kStagedCombine, kStagedAll});
      time_halves();
    }
    LlResults results;
    results.equal_bits = at_.all(same_as_low_latency(landed_) && same_as_low_latency(staged_));
    for (std::size_t step = 0; step < kSteps.size(); ++step) {
      std::vector<double> slowest = at_.slowest(seconds_[step]);
      if (at_.rank == 0) results.times.push_back({kSteps[step], std::move(slowest)});
    }
    results.memory = ll_.memory();
    return results;
  }

 private:
  static constexpr int kRounds = 5;
  using Part = Stopwatch::Part;

  void time(Step step, const std::vector<Part>& parts) {
    const Iterations all{w_.warmup, w_.iters};
    const std::vector<double> seconds = at_.watch.measure_parts(all.share(round_, kRounds), parts);
    seconds_[step].insert(seconds_[step].end(), seconds.begin(), seconds.end());
  }
  static Part call(EpCalls& calls, Operation operation) {
    return {.body = [&calls, operation](int) { calls.call(operation); }};
  }
  // Experts compute between dispatch and combine; their time does not count.
  Part with_experts(const std::function<void()>& body) {
    return {.body = [body](int) { body(); }, .after = [this] { experts(); }};
  }
  void experts() const { compute_all(ll_.recv()); }
  void compute_all(const Tensor& received) const {
    if (w_.receive != Receive::slots) return compute_rows(received, ll_.row_offsets());
    compute(received, ll_.counts());
  }

  void time_whole() {
    time(kDispatch, {with_experts([&] { ll_.dispatch(); })});
    time(kCombine, {with_experts([&] { ll_.combine(); })});
    time(kBoth, {with_experts([&] { ll_.dispatch(); }), Part{.body = [&](int) { ll_.combine(); }}});
    time(kDispatchFp8, {Part{.body = [&](int) { ll_.dispatch_fp8(); },
                             .after = [&] { compute_all(ll_.recv_fp8()); }}});
  }
  void time_halves() {
    const auto dispatch = [this](xd_ll_phase phase) { ll_.dispatch(phase); };
    const auto combine = [this](xd_ll_phase phase) { ll_.combine(phase); };
    time_halves_of(dispatch, kSendDispatch, kHalvesOfDispatch);
    time_halves_of(combine, kSendCombine, kHalvesOfCombine);
  }
  void time_halves_of(const std::function<void(xd_ll_phase)>& operation, Step send, Step both) {
    time(send, {Part{.body = [&](int) { operation(XD_LL_PHASE_SEND); },
                     .after =
                         [&] {
                           operation(XD_LL_PHASE_RECEIVE);
                           experts();
                         }}});
    time(both, {with_experts([&] {
           operation(XD_LL_PHASE_SEND);
           operation(XD_LL_PHASE_RECEIVE);
         })});
  }
  struct LandedSteps {
    Step dispatch, combine, all;
  };
  void time_landed(EpCalls& calls, const LandedSteps& steps) {
    const auto experts = [&] { compute(calls.recv().data(), calls.recv_bytes()); };
    Part dispatch = call(calls, Operation::dispatch), combine = call(calls, Operation::combine);
    calls.call(Operation::prepare);
    dispatch.after = experts;
    time(steps.dispatch, {dispatch});
    Part before_experts = combine;
    before_experts.after = experts;
    time(steps.combine, {before_experts});
    dispatch.body = [&](int) {
      calls.call(Operation::prepare);
      calls.call(Operation::dispatch);
    };
    time(steps.all, {dispatch, combine});
  }

  // On this rank.
  bool same_as_low_latency(const EpCalls& calls) const {
    return std::memcmp(ll_.out().data(), calls.out().data(), ll_.out().bytes()) == 0;
  }

  const Workload& w_;
  const Rank& at_;
  const EpInputs in_;
  LlCalls ll_;
  EpCalls landed_, staged_;
  int round_ = 0;
  std::vector<std::vector<double>> seconds_;  // [step][iteration], of this rank
};

}  // namespace

LlResults run_ll(const Launch& launch, int rank, const Workload& w) {
  const Traffic traffic = traffic_of(w, make_routing(w), rank);
  const std::string name = "bench-ll-" + std::to_string(w.tokens);
  const std::size_t heap =
      HostStopwatch::kHeapBytes + EpCalls::heap_bytes(w, traffic) + (std::size_t{1} << 20);
  const Comm comm = make_comm(launch, rank, {.name = name.c_str(), .heap_bytes = heap});
  HostStopwatch watch(comm.get(), rank);
  const Rank at{rank, w.ranks, comm.get(), host(), watch};
  return LlRun(w, traffic, at).run();
}

}  // namespace bench
