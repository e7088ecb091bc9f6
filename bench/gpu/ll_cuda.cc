#include "ll_cuda.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <set>
#include <string>

#include "../ll_calls.h"
#include "../report.h"
#include "blocks.h"
#include "nccl.h"
#include "wire_floor.h"

namespace bench::gpu {
namespace {

constexpr int kChain = 20;  // operations of a graph
constexpr const char* kLowLatency = "low latency";
constexpr const char *kEvents = "events", *kKernel = "kernel";

// With XD_LL_DEPENDENT=0 in the environment kernels begin one after the other, and so they do where
// two of a budget fit the device.
const char* graph_clock(int budget, int sms) {
  const char* const set = std::getenv("XD_LL_DEPENDENT");
  const bool off = set != nullptr && std::string(set) == "0";
  return off || (budget != 0 && 2 * budget <= sms) ? "graph" : "graph, dependent";
}

Workload with(Workload w, Element element) {
  w.element = element;
  return w;
}

class LlMeasurement {
 public:
  LlMeasurement(const RankContext& at, const RankContext& at_fp8, LlResults& results)
      : at_(at),
        at_fp8_(at_fp8),
        results_(results),
        traffic_(traffic_of(at.workload(), at.batch.routing, at.rank)),
        payload_{Cell::bf16, at.workload().hidden, at.workload().seed},
        in_(at.workload(), traffic_, nullptr, at.stream),
        ll_(at.workload(), at, in_),
        stamps_(at.stream,
                std::vector<std::uint64_t>(2 * static_cast<std::size_t>(at.iterations().all()))) {
    ok(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, at.device.dl().device_id),
       "SMs");
    fill_rows(payload_, at.rank, in_.tokens.data(), in_.tokens.rows(), at.stream);
    at.stream.wait("filling the tokens");
  }

  void run(bool has_nccl) {
    check();
    const std::vector<double> empty = stamped([&](int) { launch_nothing(sms_, 1024, at_.stream); });
    const double idle = percentile(empty, 0.5);  // of this rank
    whole({"dispatch", kLowLatency, "bf16", ""}, idle, [&] { ll_.dispatch(); });
    whole({"combine", kLowLatency, "bf16", ""}, idle, [&] { ll_.combine(); });
    whole({"combine", kLowLatency, "fp8", ""}, idle, [&] { ll_.combine_fp8(); });
    whole({"dispatch", kLowLatency, "fp8", ""}, idle, [&] { ll_.dispatch_fp8(); });
    ll_.dispatch();
    chain({"dispatch + combine", kLowLatency, "bf16", ""}, [&] {
      ll_.dispatch();
      ll_.combine();
    });
    halves("bf16", "dispatch", [&](xd_ll_phase phase) { ll_.dispatch(phase); });
    halves("fp8", "dispatch", [&](xd_ll_phase phase) { ll_.dispatch_fp8(phase); });
    ll_.dispatch();
    halves("bf16", "combine", [&](xd_ll_phase phase) { ll_.combine(phase); });
    halves("fp8", "combine", [&](xd_ll_phase phase) { ll_.combine_fp8(phase); });
    check();
    if (at_.ranks > 1 && at_.workload().sms == 0) floors(has_nccl);  // which no budget changes
    add({"empty kernel", "-", "-", kEvents},
        at_.watch.measure(at_.iterations(), [&](int) { launch_nothing(sms_, 1024, at_.stream); }));
    results_.memory = ll_.memory();
    results_.equal_bits = true;  // check() throws where they are not
    at_.settle("the end of a case");
  }

 private:
  using Step = std::function<void()>;

  // Dispatches and combines once over poisoned outputs, and compares all sums. The experts return
  // their rows unchanged. Collective.
  void check() {
    at_.stream.fill(ll_.recv().data(), 0xff, ll_.recv().bytes());
    at_.stream.fill(ll_.out().data(), 0xff, ll_.out().bytes());
    ll_.dispatch();
    ll_.combine();
    at_.settle("a checked step");
    ll_.check_status();
    std::vector<Origin> origins;
    for (int token = 0; token < at_.workload().tokens; ++token) {
      origins.push_back({at_.rank, token, rows_of(token)});
    }
    const DeviceArray<Origin> expected(at_.stream, origins);
    const WrongElements wrong(at_.stream);
    check_rows(payload_, ll_.out().data(), expected.data(), expected.size(), wrong.counter(),
               at_.stream);
    wrong.expect_none("sums");
  }

  // The rows that are received of one of this rank's tokens.
  int rows_of(int token) const {
    const Workload& w = at_.workload();
    if (w.receive != Receive::by_rank) return w.topk;
    std::set<int> ranks;
    for (int k = 0; k < w.topk; ++k) {
      const auto choice = static_cast<std::size_t>(token) * static_cast<std::size_t>(w.topk) +
                          static_cast<std::size_t>(k);
      ranks.insert(traffic_.choices[choice] / w.local_experts());
    }
    return static_cast<int>(ranks.size());
  }

  // Collective.
  void add(const LlStep& step, const std::vector<double>& mine, int sms = 0) {
    std::vector<double> slowest = at_.slowest(mine);
    if (at_.rank == 0) results_.times.push_back({step, std::move(slowest), sms});
  }
  int sms_of(const LlStep& step, const Step& enqueue) const {
    return std::min(blocks_of(step.operation, enqueue, at_.stream), sms_);
  }
  static LlStep by(LlStep step, const char* clock) {
    step.clock = clock;
    return step;
  }

  void whole(const LlStep& step, double idle, const Step& enqueue) {
    std::vector<double> seconds = stamped([&](int) { enqueue(); });
    for (double& one : seconds) one = std::max(one - idle, 0.0);
    const int sms = sms_of(step, enqueue);
    add(by(step, kKernel), seconds, sms);
    add(by(step, kEvents), at_.watch.measure(at_.iterations(), [&](int) { enqueue(); }), sms);
    ll_.check_status();
    chain(step, enqueue);
  }

  // Seconds between two looks at the device's clock.
  std::vector<double> stamped(const std::function<void(int)>& enqueue) {
    at_.watch.measure(at_.iterations(), [&](int i) {
      std::uint64_t* const around = stamps_.data() + std::ptrdiff_t{2} * i;
      launch_stamp(around, at_.stream);
      enqueue(i);
      launch_stamp(around + 1, at_.stream);
    });
    std::vector<std::uint64_t> ns(static_cast<std::size_t>(stamps_.size()));
    at_.stream.copy(ns.data(), stamps_.data(), ns.size() * sizeof(ns[0]));
    std::vector<double> seconds;
    for (int i = at_.iterations().warmup; i < at_.iterations().all(); ++i) {
      const auto first = 2 * static_cast<std::size_t>(i);
      seconds.push_back(static_cast<double>(ns[first + 1] - ns[first]) * 1e-9);
    }
    return seconds;
  }

  // Many operations in a graph, of which nothing but the operation itself takes time.
  void chain(const LlStep& step, const Step& enqueue) {
    const std::function<void()> replay = at_.stream.capture([&] {
      for (int i = 0; i < kChain; ++i) enqueue();
    });
    at_.barrier();
    std::vector<double> seconds = at_.watch.measure(at_.iterations(), [&](int) { replay(); });
    for (double& one : seconds) one /= kChain;
    at_.settle("a graph");
    ll_.check_status();
    add(by(step, graph_clock(at_.workload().sms, sms_)), seconds, sms_of(step, enqueue));
  }

  void halves(const char* rows, const std::string& name,
              const std::function<void(xd_ll_phase)>& enqueue) {
    const auto send = [&] { enqueue(XD_LL_PHASE_SEND); };
    const auto receive = [&] { enqueue(XD_LL_PHASE_RECEIVE); };
    const bool combines = name == "combine";
    const LlStep first{combines ? "combine, send half" : "dispatch, send half", kLowLatency, rows,
                       kEvents};
    const LlStep second{combines ? "combine, receive half" : "dispatch, receive half", kLowLatency,
                        rows, kEvents};
    add(first,
        at_.watch.measure_parts(at_.iterations(),
                                {Stopwatch::Part{.body = [&](int) { send(); }, .after = receive}}),
        sms_of(first, send));
    add(second,
        at_.watch.measure_parts(at_.iterations(),
                                {Stopwatch::Part{.body = [&](int) { receive(); }, .before = send}}),
        sms_of(second, receive));
    add({combines ? "combine, both halves" : "dispatch, both halves", kLowLatency, rows, kEvents},
        at_.watch.measure(at_.iterations(), [&](int) {
          send();
          receive();
        }));
    ll_.check_status();
  }

  void floors(bool has_nccl) {
    for (const RankContext* const at : {&at_, &at_fp8_}) {
      const char* const rows = at == &at_ ? "bf16" : "fp8";
      const WireFloor floor(*at);
      at->barrier();
      WireFloor::Result put = floor.measure_kernels();
      at->settle("the end of the floor");
      if (at_.rank == 0) {
        results_.times.push_back({{"plain put", "one kernel", rows, kEvents}, put.seconds});
      }
      if (!has_nccl) continue;
      std::vector<double> slowest = measure_nccl(*at, at->batch.bytes_per_peer());
      if (at_.rank == 0) {
        results_.times.push_back({{"all-to-all", "NCCL", rows, kEvents}, std::move(slowest)});
      }
    }
  }

  const RankContext& at_;
  const RankContext& at_fp8_;
  LlResults& results_;
  const Traffic traffic_;
  const Payload payload_;
  const EpInputs in_;
  LlCalls ll_;
  const DeviceArray<std::uint64_t> stamps_;
  int sms_ = 0;
};

}  // namespace

LlResults run_ll(const Launch& launch, int rank, const Workload& workload) {
  const Place place = place_ranks(launch);
  const int device = place.device_of(rank);
  ok(cudaSetDevice(device), "cudaSetDevice");
  const Batch batch(with(workload, Element::bf16)), fp8(with(workload, Element::bf16_to_fp8));
  const std::string name =
      "bench-ll-" + std::to_string(workload.tokens) + "-" + std::to_string(workload.sms);
  const std::size_t landing = WireFloor::landing_bytes(batch);
  const Means means(launch, rank,
                    {.name = name.c_str(),
                     .heap_bytes = Means::heap_bytes(landing),
                     .device = {kDLCUDA, device},
                     .unique_id = nullptr,
                     .timeout_ms = kTimeoutMs},
                    landing);
  const RankContext at(means, batch), at_fp8(means, fp8);
  LlResults results;
  const bool has_nccl = !place.shares_devices() && nccl_state().unavailable.empty();
  LlMeasurement(at, at_fp8, results).run(has_nccl);
  return results;
}

}  // namespace bench::gpu
