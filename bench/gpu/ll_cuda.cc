#include "ll_cuda.h"

#include <algorithm>
#include <cstdlib>
#include <functional>
#include <string>

#include "../report.h"
#include "captured.h"
#include "driver.h"
#include "ll_rank.h"
#include "nccl.h"
#include "wire_floor.h"

namespace bench::gpu {
namespace {

constexpr int kChain = 20;  // operations of a graph
constexpr int kTimeoutMs = 20000;
constexpr const char* kLowLatency = "low latency";
constexpr const char *kEvents = "events", *kKernel = "kernel";

// With XD_LL_DEPENDENT=0 in the environment kernels begin one after the other.
const char* graph_clock() {
  const char* const set = std::getenv("XD_LL_DEPENDENT");
  return set != nullptr && std::string(set) == "0" ? "graph" : "graph, dependent";
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
        ll_(at),
        stamps_(at.stream,
                std::vector<std::uint64_t>(2 * static_cast<std::size_t>(at.iterations().all()))) {
    ok(cudaDeviceGetAttribute(&sms_, cudaDevAttrMultiProcessorCount, at.device), "SMs");
  }

  void run(const SharedMemory& landing, bool has_nccl) {
    ll_.check();
    const std::vector<double> empty = stamped([&](int) { launch_nothing(sms_, 1024, at_.stream); });
    const double idle = percentile(empty, 0.5);  // of this rank
    whole({"dispatch", kLowLatency, "bf16", ""}, idle, [&] { ll_.dispatch(); });
    whole({"combine", kLowLatency, "bf16", ""}, idle, [&] { ll_.combine(); });
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
    ll_.check();
    if (at_.ranks() > 1) floors(landing, has_nccl);
    add({"empty kernel", "-", "-", kEvents},
        at_.watch.measure(at_.iterations(), [&](int) { launch_nothing(sms_, 1024, at_.stream); }));
    results_.memory = ll_.memory();
    results_.equal_bits = true;  // check() throws where they are not
    at_.settle("the end of a case");
  }

 private:
  using Step = std::function<void()>;

  // Collective.
  void add(const LlStep& step, const std::vector<double>& mine, int sms = 0) {
    std::vector<double> slowest = at_.rank_results.slowest(mine);
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
    ok(cudaMemcpyAsync(ns.data(), stamps_.data(), ns.size() * sizeof(ns[0]), cudaMemcpyDeviceToHost,
                       at_.stream),
       "copy of stamps");
    at_.stream.wait("copy of stamps");
    std::vector<double> seconds;
    for (int i = at_.iterations().warmup; i < at_.iterations().all(); ++i) {
      const auto first = 2 * static_cast<std::size_t>(i);
      seconds.push_back(static_cast<double>(ns[first + 1] - ns[first]) * 1e-9);
    }
    return seconds;
  }

  // Many operations in a graph, of which nothing but the operation itself takes time.
  void chain(const LlStep& step, const Step& enqueue) {
    cudaGraph_t graph = nullptr;
    cudaGraphExec_t executable = nullptr;
    ok(cudaStreamBeginCapture(at_.stream, cudaStreamCaptureModeThreadLocal), "capture");
    for (int i = 0; i < kChain; ++i) enqueue();
    ok(cudaStreamEndCapture(at_.stream, &graph), "capture");
    ok(cudaGraphInstantiate(&executable, graph, 0), "instantiating a graph");
    ok(cudaGraphUpload(executable, at_.stream), "uploading a graph");
    at_.settle("uploading a graph");
    std::vector<double> seconds = at_.watch.measure(at_.iterations(), [&](int) {
      ok(cudaGraphLaunch(executable, at_.stream), "cudaGraphLaunch");
    });
    for (double& one : seconds) one /= kChain;
    at_.settle("a graph");
    ll_.check_status();
    cudaGraphExecDestroy(executable);
    cudaGraphDestroy(graph);
    add(by(step, graph_clock()), seconds, sms_of(step, enqueue));
  }

  void halves(const char* rows, const std::string& name,
              const std::function<void(xd_ll_phase)>& enqueue) {
    const auto send = [&] { enqueue(XD_LL_PHASE_SEND); };
    const auto receive = [&] { enqueue(XD_LL_PHASE_RECEIVE); };
    const auto nothing = [] {};
    const bool combines = name == "combine";
    const LlStep first{combines ? "combine, send half" : "dispatch, send half", kLowLatency, rows,
                       kEvents};
    const LlStep second{combines ? "combine, receive half" : "dispatch, receive half", kLowLatency,
                        rows, kEvents};
    add(first,
        at_.watch.measure_between(
            at_.iterations(), nothing, [&](int) { send(); }, receive),
        sms_of(first, send));
    add(second,
        at_.watch.measure_between(
            at_.iterations(), send, [&](int) { receive(); }, nothing),
        sms_of(second, receive));
    add({combines ? "combine, both halves" : "dispatch, both halves", kLowLatency, rows, kEvents},
        at_.watch.measure(at_.iterations(), [&](int) {
          send();
          receive();
        }));
    ll_.check_status();
  }

  void floors(const SharedMemory& landing, bool has_nccl) {
    for (const RankContext* const at : {&at_, &at_fp8_}) {
      const char* const rows = at == &at_ ? "bf16" : "fp8";
      const WireFloor floor(*at, landing);
      at->barrier();
      WireFloor::Result put = floor.measure_kernels();
      at->settle("the end of the floor");
      if (at_.rank == 0) {
        results_.times.push_back({{"plain put", "one kernel", rows, kEvents}, put.seconds});
      }
      if (!has_nccl) continue;
      std::vector<double> slowest = measure_nccl(*at, bytes_per_peer(at->batch));
      if (at_.rank == 0) {
        results_.times.push_back({{"all-to-all", "NCCL", rows, kEvents}, std::move(slowest)});
      }
    }
  }
  // The bytes of the batch, split equally over the peers.
  static std::size_t bytes_per_peer(const Batch& batch) {
    const std::size_t ranks = batch.rows.size();
    std::int64_t sent = 0;
    for (std::size_t s = 0; s < ranks; ++s) {
      for (std::size_t d = 0; d < ranks; ++d) sent += s == d ? 0 : batch.rows[s][d];
    }
    return static_cast<std::size_t>(sent) * batch.workload.wire_row_bytes() /
           (ranks * (ranks - 1)) / 16 * 16;
  }

  const RankContext& at_;
  const RankContext& at_fp8_;
  LlResults& results_;
  LlRank ll_;
  const DeviceArray<std::uint64_t> stamps_;
  int sms_ = 0;
};

}  // namespace

void set_up_ll() { set_up_environment(); }

LlResults run_ll(const Launch& launch, int rank, const Workload& workload) {
  std::string why;
  const int devices = count_devices(&why);
  if (devices == 0) throw std::runtime_error("no GPU: " + why);
  const bool shared = launch.num_ranks > devices;
  const int device = rank / ((launch.num_ranks + devices - 1) / devices);
  ok(cudaSetDevice(device), "cudaSetDevice");
  const Batch batch(with(workload, Element::bf16)), fp8(with(workload, Element::bf16_to_fp8));
  const std::string name = "bench-ll-" + std::to_string(workload.tokens);
  const std::size_t heap =
      Stopwatch::slots_bytes() + WireFloor::landing_bytes(batch) + (std::size_t{4} << 20);
  const Comm comm = make_comm(launch, rank,
                              {.name = name.c_str(),
                               .heap_bytes = heap,
                               .device = {kDLCUDA, device},
                               .unique_id = nullptr,
                               .timeout_ms = kTimeoutMs});
  const Stream stream;
  // These are made first and in this order, equal on all ranks: see SharedMemory.
  const SharedMemory slots(comm.get(), stream, Stopwatch::slots_bytes());
  const SharedMemory landing(comm.get(), stream, WireFloor::landing_bytes(batch));
  bench::ok(xd_comm_barrier(comm.get()));
  RankResults rank_results(comm.get(), rank, workload.ranks);
  Stopwatch watch(slots, rank, workload.ranks, stream);
  const auto context = [&](const Batch& of) {
    return RankContext{.rank = rank,
                       .device = device,
                       .comm = comm.get(),
                       .stream = stream,
                       .batch = of,
                       .rank_results = rank_results,
                       .watch = watch};
  };
  const RankContext at = context(batch), at_fp8 = context(fp8);
  LlResults results;
  LlMeasurement(at, at_fp8, results).run(landing, !shared && nccl_state().unavailable.empty());
  return results;
}

}  // namespace bench::gpu
