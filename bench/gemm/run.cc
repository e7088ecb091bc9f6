#include "run.h"

#include <array>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <optional>
#include <utility>

#include "../report.h"
#include "../routing.h"

namespace bench {
namespace {

constexpr int kRounds = 5;  // the ways take them in turn

// The values of a call's `algo`, by name.
constexpr std::array<std::pair<xd_gemm_algo, const char*>, 4> kAlgos{{
    {XD_GEMM_ALGO_AUTO, "AUTO"},
    {XD_GEMM_ALGO_DIRECT, "DIRECT"},
    {XD_GEMM_ALGO_SPLIT, "SPLIT"},
    {XD_GEMM_ALGO_SEQUENTIAL, "SEQUENTIAL"},
}};

// NVIDIA's cuBLASMp has a context of its own, and takes these as hints.
constexpr std::array<std::pair<xd_gemm_algo, const char*>, 7> kCublasMpAlgos{{
    {XD_GEMM_ALGO_CUBLASMP, "CUBLASMP"},
    {XD_GEMM_ALGO_CUBLASMP_SPLIT_P2P, "CUBLASMP_SPLIT_P2P"},
    {XD_GEMM_ALGO_CUBLASMP_SPLIT_MULTICAST, "CUBLASMP_SPLIT_MULTICAST"},
    {XD_GEMM_ALGO_CUBLASMP_ATOMIC_P2P, "CUBLASMP_ATOMIC_P2P"},
    {XD_GEMM_ALGO_CUBLASMP_ATOMIC_MULTICAST, "CUBLASMP_ATOMIC_MULTICAST"},
    {XD_GEMM_ALGO_CUBLASMP_NO_OVERLAP, "CUBLASMP_NO_OVERLAP"},
    {XD_GEMM_ALGO_CUBLASMP_FUSED, "CUBLASMP_FUSED"},
}};

const char* name_of(xd_gemm_algo algo) {
  for (const auto& [known, name] : kAlgos) {
    if (known == algo) return name;
  }
  return "?";
}

struct DestroyContext {
  void operator()(xd_gemm_context* context) const { xd_gemm_context_destroy(context); }
};
using Context = std::unique_ptr<xd_gemm_context, DestroyContext>;

// On the host the library's own collectives are the transfer that products are compared with.
xd_gemm_config context_config(const GemmProblem& p, const ComputeDevice& device) {
  const bool bulk = device.dl().device_type == kDLCPU;
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.num_ranks = p.ranks;
  config.operations = XD_GEMM_BIT(p.shape.operation) | (bulk ? XD_GEMM_BIT(XD_GEMM_BULK) : 0);
  config.max_tokens = p.most_tokens();
  // A bulk gather ends the two steps of an all-reduce, so that it gathers rows of d.
  config.max_k = p.gathers() || !bulk ? p.shape.k : p.shape.n;
  config.max_n = p.shape.n;
  config.dtype = payload_type(p.element);
  config.device_type = device.dl().device_type;
  return config;
}

Context make_context(xd_comm* comm, const xd_gemm_config& config) {
  xd_gemm_context* context = nullptr;
  ok(xd_gemm_context_create(comm, &config, &context));
  return Context(context);
}

// nullptr where the problem does not ask for it.
Context make_cublasmp_context(const GemmProblem& p, xd_comm* comm, xd_gemm_config config) {
  if (!p.cublasmp) return nullptr;
  config.algo = XD_GEMM_ALGO_CUBLASMP;
  return make_context(comm, config);
}

std::int64_t a_rows(const GemmProblem& p, int rank) {
  return p.gathers() ? p.tokens_of(rank) : p.tokens;
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

class GemmRun {
 public:
  GemmRun(const GemmProblem& p, const Rank& at, xd_comm* symmetric_in,
          const MakeGemmSteps& make_steps)
      : p_(p),
        at_(at),
        config_(context_config(p, at.device)),
        tensors_(p, at, symmetric_in),
        context_(make_context(at.comm, config_)),
        cublasmp_(make_cublasmp_context(p, at.comm, config_)),
        steps_(make_steps(tensors_, context_.get())),
        shares_(p.tokens_per_rank()) {
    const auto product = [this] { steps_->product(); };
    const auto transfer = [this] { steps_->transfer(); };
    if (steps_->has_transfer()) {
      ways_.push_back({{.name = kApart, .algo = {}}, [this] { both(); }, true, {}});
      ways_.push_back({{.name = kTransfer, .algo = {}}, transfer, false, {}});
    }
    ways_.push_back({{.name = kProduct, .algo = {}}, product, false, {}});
    for (const auto& [algo, name] : kAlgos) add_algo(algo, name);
    if (!cublasmp_) return;
    for (const auto& [algo, name] : kCublasMpAlgos) add_cublasmp_algo(algo, name);
  }

  GemmResults run() {
    GemmResults results;
    fill_exact();
    at_.settle("filling the operands");
    results.right = at_.all(check());
    fill_random();
    for (const Way& way : ways_) way.run();
    at_.settle("the first calls");
    steps_->choose();
    for (int round = 0; round < kRounds; ++round) {
      for (Way& way : ways_) measure(way, round);
    }
    check_status();
    for (Way& way : ways_) {
      way.about.seconds = at_.slowest(way.about.seconds);
      if (at_.device.stream() != nullptr && way.about.name != kProduct)
        way.about.host_us = percentile(way.host, 0.5) * 1e6;
      if (at_.rank == 0) results.ways.push_back(std::move(way.about));
    }
    ok(xd_gemm_context_memory(&config_, &results.memory));
    at_.settle("the end of a case");
    return results;
  }

 private:
  struct Way {
    GemmWay about;
    std::function<void()> run;
    bool ends_with_d;          // the result is complete in d
    std::vector<double> host;  // seconds that its calls take
    Sums sums = Sums::rounded_once;
  };

  void both() {
    if (p_.gathers()) steps_->transfer();
    steps_->product();
    if (!p_.gathers()) steps_->transfer();
  }

  // An algorithm that cannot run here is left out.
  void add_algo(xd_gemm_algo algo, const char* name) {
    const xd_gemm_args args = args_of(algo);
    xd_gemm_plan_info plan = XD_GEMM_PLAN_INFO_INIT;
    const xd_status status = xd_gemm_explain(context_.get(), p_.shape.operation, &args, &plan);
    if (status == XD_ERROR_UNSUPPORTED) return;
    ok(status);
    GemmWay about{.name = name,
                  .algo = name_of(plan.algo),
                  .products = plan.num_products,
                  .estimate_us = plan.estimate_us};
    const auto call = [this, args] { ok(call_gemm(context_.get(), args)); };
    ways_.push_back({about, call, true, {}});
    std::function<void()> replay = at_.device.capture(call);
    if (!replay) return;
    about.name += ", graph";
    ways_.push_back({std::move(about), std::move(replay), true, {}});
  }

  // It cannot be captured. cuBLASMp may refuse it at the first call, then on all ranks.
  void add_cublasmp_algo(xd_gemm_algo algo, const char* name) {
    const xd_gemm_args args = args_of(algo);
    xd_gemm_plan_info plan = XD_GEMM_PLAN_INFO_INIT;
    xd_status status = xd_gemm_explain(cublasmp_.get(), p_.shape.operation, &args, &plan);
    if (status == XD_SUCCESS) status = call_gemm(cublasmp_.get(), args);
    if (status == XD_ERROR_UNSUPPORTED) {
      if (at_.rank == 0) std::fprintf(stderr, "crossdock-bench: left out: %s\n", xd_last_error());
      at_.settle(name);
      xd_gemm_status refused = XD_GEMM_STATUS_INIT;
      return ok(xd_gemm_context_status(cublasmp_.get(), &refused));
    }
    ok(status);
    at_.settle(name);
    // Terms and sums are rounded to the type of d, in an order of cuBLASMp's own.
    ways_.push_back({{.name = name, .algo = "CUBLASMP", .products = 1},
                     [this, args] { ok(call_gemm(cublasmp_.get(), args)); },
                     true,
                     {},
                     p_.gathers() ? Sums::rounded_once : Sums::rounded_each_time});
  }

  xd_gemm_args args_of(xd_gemm_algo algo) const {
    xd_gemm_args args = XD_GEMM_ARGS_INIT;
    args.a = tensors_.a.dl();
    args.b = tensors_.b.dl();
    args.d = tensors_.d.dl();
    args.tokens_per_rank = shares_.data();
    args.algo = algo;
    return args;
  }

  xd_status call_gemm(xd_gemm_context* context, const xd_gemm_args& args) const {
    switch (p_.shape.operation) {
      case XD_GEMM_ALL_GATHER:
        return xd_gemm_all_gather(context, &args, at_.device.stream());
      case XD_GEMM_REDUCE_SCATTER:
        return xd_gemm_reduce_scatter(context, &args, at_.device.stream());
      default:
        return xd_gemm_all_reduce(context, &args, at_.device.stream());
    }
  }

  void upload(const Tensor& to, const std::vector<unsigned char>& from) const {
    at_.device.copy(to.data(), from.data(), from.size());
  }
  // The numbers that check_result() knows.
  void fill_exact() const {
    std::vector<unsigned char> host(tensors_.a.bytes());
    fill_a(p_, at_.rank, host.data());
    upload(tensors_.a, host);
    host.resize(tensors_.b.bytes());
    fill_b(p_, at_.rank, host.data());
    upload(tensors_.b, host);
  }
  void fill_random() const {
    const auto seed = p_.seed * 64 + static_cast<std::uint64_t>(at_.rank) * 2;
    const auto fill = [&](const Tensor& tensor, std::uint64_t its_seed) {
      upload(tensor, random_elements(p_.element, tensor.bytes(), its_seed));
    };
    fill(tensors_.a, seed);
    fill(tensors_.b, seed + 1);
    if (p_.gathers()) fill(tensors_.whole, seed);
  }

  // Collective. Every way runs once, without the common start that measurements begin with. True if
  // on this rank every way has exact sums, and the bits of the first that rounds them once.
  bool check() const {
    bool right = true;
    std::optional<std::pair<std::uint64_t, std::string>> first;
    std::vector<unsigned char> d(tensors_.d.bytes());
    for (const Way& way : ways_) {
      at_.device.fill(tensors_.d.data(), 0xff, d.size());
      at_.settle("poison");
      way.run();
      at_.settle(way.about.name.c_str());
      check_status();
      if (!way.ends_with_d) continue;
      at_.device.copy(d.data(), tensors_.d.data(), d.size());
      const Sums sums = way.about.algo.empty() ? steps_->sums() : way.sums;
      std::string wrong = check_result(p_, at_.rank, d.data(), sums);
      const std::uint64_t sum = checksum(d.data(), d.size(), 0);
      const bool comparable = sums == Sums::rounded_once;
      if (comparable && !first) first = {sum, way.about.name};
      if (wrong.empty() && comparable && sum != first->first)
        wrong = "other bits than " + first->second;
      if (wrong.empty()) continue;
      right = false;
      std::fprintf(stderr, "crossdock-bench: rank %d: %s: %s: %s\n", at_.rank,
                   p_.shape.name.c_str(), way.about.name.c_str(), wrong.c_str());
    }
    return right;
  }

  void measure(Way& way, int round) {
    using Clock = std::chrono::steady_clock;
    const Iterations iterations = Iterations{p_.warmup, p_.iters}.share(round, kRounds);
    const std::vector<double> seconds = at_.watch.measure(iterations, [&](int i) {
      const Clock::time_point begin = Clock::now();
      way.run();
      const Clock::time_point end = Clock::now();
      if (i >= iterations.warmup)
        way.host.push_back(std::chrono::duration<double>(end - begin).count());
    });
    way.about.seconds.insert(way.about.seconds.end(), seconds.begin(), seconds.end());
  }

  void check_status() const {
    for (const Context* context : {&context_, &cublasmp_}) {
      if (*context == nullptr) continue;
      bench::check_status(at_.comm, context->get(), xd_gemm_context_status,
                          xd_gemm_status XD_GEMM_STATUS_INIT);
    }
  }

  const GemmProblem& p_;
  const Rank& at_;
  const xd_gemm_config config_;
  const GemmTensors tensors_;
  const Context context_, cublasmp_;
  const std::unique_ptr<GemmSteps> steps_;
  const std::vector<std::int64_t> shares_;
  std::vector<Way> ways_;
};

}  // namespace

GemmTensors::GemmTensors(const GemmProblem& p, const Rank& at, xd_comm* symmetric_in)
    : a(symmetric_in, at.device, payload_type(p.element), {a_rows(p, at.rank), p.shape.k}),
      b(nullptr, at.device, payload_type(p.element), {p.shape.n, p.shape.k}),
      d(nullptr, at.device, payload_type(p.element),
        {p.scatters() ? p.tokens_of(at.rank) : p.tokens, p.shape.n}),
      whole(p.gathers() ? nullptr : symmetric_in, at.device, payload_type(p.element),
            {p.tokens, p.gathers() ? p.shape.k : p.shape.n}) {}

std::size_t GemmTensors::heap_bytes(const GemmProblem& p, int rank) {
  const std::int64_t whole = p.gathers() ? 0 : p.tokens * p.shape.n;
  return static_cast<std::size_t>(a_rows(p, rank) * p.shape.k + whole) * p.element_bytes();
}

GemmResults measure_gemm(const GemmProblem& problem, const Rank& at, xd_comm* symmetric_in,
                         const MakeGemmSteps& make_steps) {
  return GemmRun(problem, at, symmetric_in, make_steps).run();
}

}  // namespace bench
