#include "gemm_cuda.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "../report.h"
#include "../routing.h"
#include "../tensor.h"
#include "driver.h"
#include "machine.h"
#include "nccl.h"
#include "product_floor.h"

namespace bench::gpu {
namespace {

constexpr int kTimeoutMs = 20000;
constexpr int kRounds = 5;  // the ways take them in turn

// The means that the ranks of a measurement share.
struct At {
  int rank, ranks, device;
  xd_comm* comm;
  const Stream& stream;
  const RankResults& rank_results;
  Stopwatch& watch;

  void settle(const char* what) const {
    stream.wait(what);
    bench::ok(xd_comm_barrier(comm));
  }
};

// A matrix in memory that NCCL may use.
class OpenMatrix {
 public:
  OpenMatrix(const At& at, Element element, std::int64_t rows, std::int64_t columns)
      : shape_{rows, columns},
        bytes_(static_cast<std::size_t>(rows * columns) * (element == Element::fp32 ? 4 : 2)),
        memory_(bytes_),
        tensor_{
            memory_.data(), {kDLCUDA, at.device}, 2, payload_type(element), shape_, nullptr, 0} {}
  OpenMatrix(const OpenMatrix&) = delete;
  OpenMatrix& operator=(const OpenMatrix&) = delete;

  const DLTensor* dl() const { return &tensor_; }
  std::byte* data() const { return memory_.data(); }
  std::size_t bytes() const { return bytes_; }

 private:
  std::int64_t shape_[2];
  const std::size_t bytes_;
  const OpenMemory memory_;
  DLTensor tensor_;
};

void upload(const OpenMatrix& to, const std::vector<unsigned char>& from, const Stream& stream) {
  ok(cudaMemcpyAsync(to.data(), from.data(), from.size(), cudaMemcpyHostToDevice, stream),
     "copy to the device");
  stream.wait("copy to the device");
}

// Numbers of magnitude 1/2 to 1 with random signs and fractions: what a product of them draws in
// power, and so the clock, is that of ordinary data.
std::vector<unsigned char> random_elements(Element element, std::size_t bytes, std::uint64_t seed) {
  const std::uint64_t keep = element == Element::fp32   ? 0x807fffff807fffffu
                             : element == Element::bf16 ? 0x807f807f807f807fu
                                                        : 0x83ff83ff83ff83ffu;
  const std::uint64_t set = element == Element::fp32   ? 0x3f0000003f000000u
                            : element == Element::bf16 ? 0x3f003f003f003f00u
                                                       : 0x3800380038003800u;
  std::vector<unsigned char> data(bytes);
  Random random(seed);
  for (std::size_t at = 0; at < bytes; at += sizeof(std::uint64_t)) {
    const std::uint64_t bits = (random.next() & keep) | set;
    std::memcpy(data.data() + at, &bits, std::min(sizeof(bits), bytes - at));
  }
  return data;
}

// `whole` are rows of all tokens on this rank's side of the transfer: those that are gathered, or
// the terms of the sum.
struct Operands {
  OpenMatrix a, b, d, whole;

  Operands(const GemmProblem& p, const At& at)
      : a(at, p.element, p.gathers() ? p.tokens_of(at.rank) : p.tokens, p.shape.k),
        b(at, p.element, p.shape.n, p.shape.k),
        d(at, p.element, p.scatters() ? p.tokens_of(at.rank) : p.tokens, p.shape.n),
        whole(at, p.element, p.tokens, p.gathers() ? p.shape.k : p.shape.n) {}

  // Fills in the numbers that check_result() knows.
  void fill_exact(const GemmProblem& p, const At& at) const {
    std::vector<unsigned char> host(a.bytes());
    fill_a(p, at.rank, host.data());
    upload(a, host, at.stream);
    host.resize(b.bytes());
    fill_b(p, at.rank, host.data());
    upload(b, host, at.stream);
  }
  void fill_random(const GemmProblem& p, const At& at) const {
    const auto seed = p.seed * 64 + static_cast<std::uint64_t>(at.rank) * 2;
    upload(a, random_elements(p.element, a.bytes(), seed), at.stream);
    upload(b, random_elements(p.element, b.bytes(), seed + 1), at.stream);
    if (p.gathers()) upload(whole, random_elements(p.element, whole.bytes(), seed), at.stream);
  }
};

// The two steps that the library interleaves, by cuBLASLt and NCCL.
class Apart {
 public:
  Apart(const GemmProblem& p, const At& at, const Operands& operands, bool has_nccl)
      : p_(p),
        o_(operands),
        floor_(p,
               {.a = (p.gathers() ? operands.whole : operands.a).data(),
                .b = operands.b.data(),
                .d = (p.gathers() ? operands.d : operands.whole).data()},
               at.stream) {
    if (has_nccl) nccl_.emplace(at.rank, at.ranks, at.rank_results, at.stream);
  }

  bool has_transfer() const { return nccl_.has_value(); }
  void product() const { floor_.enqueue(); }
  // NCCL's shares are equal: run_gemm() sees to that.
  void transfer() const {
    const auto n = static_cast<std::size_t>(p_.shape.n), k = static_cast<std::size_t>(p_.shape.k);
    const auto all = static_cast<std::size_t>(p_.tokens);
    const std::size_t share = all / static_cast<std::size_t>(p_.ranks);
    if (p_.gathers()) {
      nccl_->all_gather(o_.a.data(), o_.whole.data(), share * k, p_.element);
    } else if (p_.scatters()) {
      nccl_->reduce_scatter(o_.whole.data(), o_.d.data(), share * n, p_.element);
    } else {
      nccl_->all_reduce(o_.whole.data(), o_.d.data(), all * n, p_.element);
    }
  }
  void both() const {
    if (p_.gathers()) transfer();
    product();
    if (!p_.gathers()) transfer();
  }

  // Collective. Takes the candidate that is fastest where all ranks compute at once.
  void choose(const At& at) {
    std::int32_t best = 0;
    double least = 0;
    for (int i = 0; i < floor_.candidates(); ++i) {
      floor_.choose(i);
      const auto slowest =
          at.rank_results.slowest(at.watch.measure({2, 6}, [&](int) { product(); }));
      if (at.rank != 0) continue;
      const double p50 = percentile(slowest, 0.5);
      if (i == 0 || p50 < least) {
        best = i;
        least = p50;
      }
    }
    at.rank_results.broadcast(std::as_writable_bytes(std::span(&best, 1)));
    floor_.choose(best);
  }

 private:
  const GemmProblem& p_;
  const Operands& o_;
  ProductFloor floor_;
  std::optional<NcclCollectives> nccl_;
};

struct DestroyContext {
  void operator()(xd_gemm_context* context) const { xd_gemm_context_destroy(context); }
};
using Context = std::unique_ptr<xd_gemm_context, DestroyContext>;

xd_gemm_config context_config(const GemmProblem& p) {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.num_ranks = p.ranks;
  config.operations = XD_GEMM_BIT(p.shape.operation);
  config.max_tokens = p.most_tokens();
  config.max_k = p.shape.k;
  config.max_n = p.shape.n;
  config.dtype = payload_type(p.element);
  config.device_type = kDLCUDA;
  return config;
}

Context make_context(xd_comm* comm, const GemmProblem& p) {
  const xd_gemm_config config = context_config(p);
  xd_gemm_context* context = nullptr;
  bench::ok(xd_gemm_context_create(comm, &config, &context));
  return Context(context);
}

// The work that `enqueue` gives a stream, to be replayed.
class Graph {
 public:
  Graph(const Stream& stream, const std::function<void()>& enqueue) : stream_(stream) {
    cudaGraph_t graph = nullptr;
    ok(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal), "capture");
    enqueue();
    ok(cudaStreamEndCapture(stream, &graph), "capture");
    const cudaError_t made = cudaGraphInstantiate(&executable_, graph, 0);
    cudaGraphDestroy(graph);
    ok(made, "instantiating a graph");
    ok(cudaGraphUpload(executable_, stream), "uploading a graph");
  }
  ~Graph() { cudaGraphExecDestroy(executable_); }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;

  void launch() const { ok(cudaGraphLaunch(executable_, stream_), "cudaGraphLaunch"); }

 private:
  const Stream& stream_;
  cudaGraphExec_t executable_ = nullptr;
};

class GemmMeasurement {
 public:
  GemmMeasurement(const GemmProblem& p, const At& at, bool has_nccl)
      : p_(p),
        at_(at),
        operands_(p, at),
        apart_(p, at, operands_, has_nccl),
        context_(make_context(at.comm, p)),
        shares_(p.tokens_per_rank()) {
    if (apart_.has_transfer()) {
      add(
          {.name = kApart, .algo = {}}, [this] { apart_.both(); }, true);
      add(
          {.name = kTransfer, .algo = {}}, [this] { apart_.transfer(); }, false);
    }
    add(
        {.name = kProduct, .algo = {}}, [this] { apart_.product(); }, false);
    for (const auto& [algo, name] : kGemmAlgos) add_algo(algo, name);
  }

  GemmResults run() {
    GemmResults results;
    operands_.fill_exact(p_, at_);
    at_.settle("filling the operands");
    results.right = check();
    operands_.fill_random(p_, at_);
    for (const Way& way : ways_) way.run();
    at_.settle("the first calls");
    apart_.choose(at_);
    for (int round = 0; round < kRounds; ++round) {
      for (Way& way : ways_) measure(way, round);
    }
    check_status();
    for (Way& way : ways_) {
      way.about.seconds = at_.rank_results.slowest(way.about.seconds);
      if (way.about.name != kProduct) way.about.host_us = percentile(way.host, 0.5) * 1e6;
      if (at_.rank == 0) results.ways.push_back(std::move(way.about));
    }
    const xd_gemm_config config = context_config(p_);
    bench::ok(xd_gemm_context_memory(&config, &results.memory));
    at_.settle("the end of a case");
    return results;
  }

 private:
  struct Way {
    GemmWay about;
    std::function<void()> run;
    bool ends_with_d;
    std::vector<double> host;  // seconds
  };

  void add(GemmWay about, std::function<void()> run, bool ends_with_d) {
    ways_.push_back({std::move(about), std::move(run), ends_with_d, {}});
  }

  // An algorithm that cannot run here is left out.
  void add_algo(xd_gemm_algo algo, const char* name) {
    xd_gemm_args args = XD_GEMM_ARGS_INIT;
    args.a = operands_.a.dl();
    args.b = operands_.b.dl();
    args.d = operands_.d.dl();
    args.tokens_per_rank = shares_.data();
    args.algo = algo;
    xd_gemm_plan_info plan = XD_GEMM_PLAN_INFO_INIT;
    const xd_status status = xd_gemm_explain(context_.get(), p_.shape.operation, &args, &plan);
    if (status == XD_ERROR_UNSUPPORTED) return;
    bench::ok(status);
    const GemmWay about{.name = name,
                        .algo = name_of(plan.algo),
                        .products = plan.num_products,
                        .estimate_us = plan.estimate_us};
    const auto call = [this, args] { call_gemm(p_, context_.get(), args, at_.stream); };
    add(about, call, true);
    graphs_.push_back(std::make_unique<Graph>(at_.stream, call));
    GemmWay replayed = about;
    replayed.name += ", graph";
    add(
        std::move(replayed), [graph = graphs_.back().get()] { graph->launch(); }, true);
  }

  // Collective. Every way runs once, without the gate that measurements begin with.
  bool check() {
    bool right = true;
    std::optional<std::uint64_t> first;
    std::vector<unsigned char> d(operands_.d.bytes());
    for (const Way& way : ways_) {
      ok(cudaMemsetAsync(operands_.d.data(), 0xff, d.size(), at_.stream), "poison");
      at_.settle("poison");
      way.run();
      at_.settle(way.about.name.c_str());
      check_status();
      if (!way.ends_with_d) continue;
      ok(cudaMemcpyAsync(d.data(), operands_.d.data(), d.size(), cudaMemcpyDeviceToHost,
                         at_.stream),
         "copy of results");
      at_.stream.wait("copy of results");
      // NCCL rounds its sums after every addition, in its own order.
      const bool ours = !way.about.algo.empty();
      std::string wrong =
          check_result(p_, at_.rank, d.data(), ours ? Sums::rounded_once : Sums::rounded_each_time);
      const std::uint64_t sum = checksum(d.data(), d.size(), 0);
      if (ours && !first) first = sum;
      if (wrong.empty() && ours && sum != *first) wrong = "other bits than AUTO";
      if (wrong.empty()) continue;
      right = false;
      std::fprintf(stderr, "crossdock-bench: rank %d: %s: %s: %s\n", at_.rank,
                   p_.shape.name.c_str(), way.about.name.c_str(), wrong.c_str());
    }
    return on_all(right);
  }

  void measure(Way& way, int round) {
    const auto share = [&](int all) { return all * (round + 1) / kRounds - all * round / kRounds; };
    const Iterations iterations{share(p_.warmup), share(p_.iters)};
    const std::vector<double> seconds = at_.watch.measure(iterations, [&](int i) {
      const auto begin = std::chrono::steady_clock::now();
      way.run();
      const auto end = std::chrono::steady_clock::now();
      if (i >= iterations.warmup) {
        way.host.push_back(std::chrono::duration<double>(end - begin).count());
      }
    });
    way.about.seconds.insert(way.about.seconds.end(), seconds.begin(), seconds.end());
  }

  // Collective. Known on rank 0.
  bool on_all(bool mine) const {
    const std::vector<double> wrong = at_.rank_results.slowest({mine ? 0.0 : 1.0});
    return !wrong.empty() && wrong.front() == 0;
  }

  void check_status() const {
    xd_error_info error = XD_ERROR_INFO_INIT;
    bench::ok(xd_comm_error(at_.comm, &error));
    xd_gemm_status status = XD_GEMM_STATUS_INIT;
    if (error.status == XD_SUCCESS) {
      bench::ok(xd_gemm_context_status(context_.get(), &status));
    }
    const bool fatal = error.status != XD_SUCCESS;
    const xd_status met = fatal ? error.status : status.status;
    if (met == XD_SUCCESS) return;
    throw std::runtime_error(std::string(xd_status_name(met)) + ": " +
                             (fatal ? error.text : status.text));
  }

  const GemmProblem& p_;
  const At& at_;
  const Operands operands_;
  Apart apart_;
  const Context context_;
  const std::vector<std::int64_t> shares_;
  std::vector<std::unique_ptr<Graph>> graphs_;
  std::vector<Way> ways_;
};

}  // namespace

// cuBLASLt is too large to be loaded as a whole (CUDA_MODULE_LOADING=EAGER): every way runs once
// before it is measured.
void set_up_gemm() {
  ::setenv("NCCL_NVLS_ENABLE", "0", 1);
  ::setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
}

Json describe_gemm() {
  return {{"gpus", to_json(describe_gpus())},
          {"nccl", nccl_state().unavailable.empty() ? nccl_state().version
                                                    : "skipped: " + nccl_state().unavailable}};
}

GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem) {
  std::string why;
  const int devices = count_devices(&why);
  if (devices == 0) throw std::runtime_error("no GPU: " + why);
  const int device = rank / ((launch.num_ranks + devices - 1) / devices);
  ok(cudaSetDevice(device), "cudaSetDevice");
  load_gate();
  const bool has_nccl = launch.num_ranks > 1 && launch.num_ranks <= devices &&
                        problem.tokens % launch.num_ranks == 0 && nccl_state().unavailable.empty();
  const std::string name = "bench-gemm-" + problem.shape.name + std::to_string(problem.tokens);
  const Comm comm = make_comm(launch, rank,
                              {.name = name.c_str(),
                               .heap_bytes = Stopwatch::slots_bytes() + (std::size_t{4} << 20),
                               .device = {kDLCUDA, device},
                               .unique_id = nullptr,
                               .timeout_ms = kTimeoutMs});
  const Stream stream;
  // These are made first and in this order, equal on all ranks: see SharedMemory.
  const SharedMemory slots(comm.get(), stream, Stopwatch::slots_bytes());
  bench::ok(xd_comm_barrier(comm.get()));
  const RankResults rank_results(comm.get(), rank, problem.ranks);
  Stopwatch watch(slots, rank, problem.ranks, stream);
  const At at{.rank = rank,
              .ranks = problem.ranks,
              .device = device,
              .comm = comm.get(),
              .stream = stream,
              .rank_results = rank_results,
              .watch = watch};
  return GemmMeasurement(problem, at, has_nccl).run();
}

}  // namespace bench::gpu
