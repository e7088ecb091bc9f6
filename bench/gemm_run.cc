#include "gemm_run.h"

#include <cstdio>
#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>

#include "gemm/cpu/onednn.h"
#include "tensor.h"
#include "timing.h"

namespace bench {
namespace {

namespace cpu = xd::gemm::cpu;

constexpr std::size_t kMostWays = 3 + kGemmAlgos.size();

struct DestroyContext {
  void operator()(xd_gemm_context* context) const { xd_gemm_context_destroy(context); }
};
using Context = std::unique_ptr<xd_gemm_context, DestroyContext>;

xd_gemm_config context_config(const GemmProblem& p) {
  xd_gemm_config config = XD_GEMM_CONFIG_INIT;
  config.num_ranks = p.ranks;
  config.operations = XD_GEMM_BIT(p.shape.operation) | XD_GEMM_BIT(XD_GEMM_BULK);
  config.max_tokens = p.most_tokens();
  // A bulk gather ends the two steps of an all-reduce, so that it gathers rows of d.
  config.max_k = p.gathers() ? p.shape.k : p.shape.n;
  config.max_n = p.shape.n;
  config.dtype = payload_type(p.element);
  return config;
}

Context make_context(xd_comm* comm, const GemmProblem& p) {
  const xd_gemm_config config = context_config(p);
  xd_gemm_context* context = nullptr;
  ok(xd_gemm_context_create(comm, &config, &context));
  return Context(context);
}

// The tensors of a rank, those that peers read in symmetric memory. `whole` are rows of all tokens
// between the steps of the peer: those that are gathered, or the terms of the sum.
struct Tensors {
  Matrix a, b, d, whole, part, nothing;

  Tensors(const GemmProblem& p, int rank, xd_comm* comm)
      : a(comm, payload_type(p.element), {a_rows(p, rank), p.shape.k}),
        b(nullptr, payload_type(p.element), {p.shape.n, p.shape.k}),
        d(nullptr, payload_type(p.element),
          {p.scatters() ? p.tokens_of(rank) : p.tokens, p.shape.n}),
        whole(p.gathers() ? nullptr : comm, payload_type(p.element),
              {p.tokens, p.gathers() ? p.shape.k : p.shape.n}),
        part(comm, payload_type(p.element), {part_rows(p, rank), p.shape.n}),
        nothing(nullptr, payload_type(p.element), {0, p.shape.n}) {
    fill_a(p, rank, a.data());
    fill_b(p, rank, b.data());
  }

  static std::size_t heap_bytes(const GemmProblem& p, int rank) {
    const std::int64_t whole = p.gathers() ? 0 : p.tokens * p.shape.n;
    const std::int64_t elements =
        a_rows(p, rank) * p.shape.k + whole + part_rows(p, rank) * p.shape.n;
    return static_cast<std::size_t>(elements) * p.element_bytes() + (std::size_t{1} << 20);
  }

 private:
  static std::int64_t a_rows(const GemmProblem& p, int rank) {
    return p.gathers() ? p.tokens_of(rank) : p.tokens;
  }
  // Rows of the sum between the two steps of an all-reduce.
  static std::int64_t part_rows(const GemmProblem& p, int rank) {
    return p.shape.operation == XD_GEMM_ALL_REDUCE ? p.tokens_of(rank) : 0;
  }
};

// The steps that the library interleaves, each for itself.
class Steps {
 public:
  Steps(const GemmProblem& p, Tensors& tensors, xd_gemm_context* context)
      : p_(p), t_(tensors), context_(context), shares_(p.tokens_per_rank()) {}

  void product() const {
    const Matrix& a = p_.gathers() ? t_.whole : t_.a;
    const Matrix& d = p_.gathers() ? t_.d : t_.whole;
    if (p_.element == Element::fp32) {
      const cpu::Threads threads(cpu::cores_per_rank(p_.ranks));
      cpu::run(cpu::Sgemm{.transpose_a = 'N',
                          .transpose_b = 'T',
                          .m = p_.tokens,
                          .n = p_.shape.n,
                          .k = p_.shape.k,
                          .a = static_cast<const float*>(a.data()),
                          .lda = p_.shape.k,
                          .b = static_cast<const float*>(t_.b.data()),
                          .ldb = p_.shape.k,
                          .beta = 0,
                          .c = static_cast<float*>(d.data()),
                          .ldc = p_.shape.n});
      return;
    }
    // oneDNN's products are of float32: those of other types are the library's, beside a gather of
    // nothing.
    const std::vector<std::int64_t> none(shares_.size(), 0);
    xd_gemm_args product = XD_GEMM_ARGS_INIT;
    product.a = a.dl();
    product.b = t_.b.dl();
    product.d = d.dl();
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.product = &product;
    args.in = args.out = t_.nothing.dl();
    args.tokens_per_rank = none.data();
    ok(xd_gemm_bulk(context_, &args, nullptr));
  }

  void transfer() const {
    if (p_.gathers()) return move(XD_GEMM_ALL_GATHER, t_.a, t_.whole);
    if (p_.scatters()) return move(XD_GEMM_REDUCE_SCATTER, t_.whole, t_.d);
    move(XD_GEMM_REDUCE_SCATTER, t_.whole, t_.part);
    move(XD_GEMM_ALL_GATHER, t_.part, t_.d);
  }

  void both() const {
    if (p_.gathers()) transfer();
    product();
    if (!p_.gathers()) transfer();
  }

 private:
  void move(xd_gemm_operation collective, const Matrix& in, const Matrix& out) const {
    xd_gemm_bulk_args args = XD_GEMM_BULK_ARGS_INIT;
    args.collective = collective;
    args.in = in.dl();
    args.out = out.dl();
    args.tokens_per_rank = shares_.data();
    ok(xd_gemm_bulk(context_, &args, nullptr));
  }

  const GemmProblem& p_;
  Tensors& t_;
  xd_gemm_context* const context_;
  const std::vector<std::int64_t> shares_;
};

class GemmRun {
 public:
  GemmRun(const GemmProblem& p, int rank, xd_comm* comm)
      : p_(p),
        rank_(rank),
        comm_(comm),
        timing_(comm, rank, p.ranks, timing_size(p)),
        tensors_(p, rank, comm),
        context_(make_context(comm, p)),
        steps_(p, tensors_, context_.get()),
        shares_(p.tokens_per_rank()) {
    add_steps();
    for (const auto& [algo, name] : kGemmAlgos) add_algo(algo, name);
  }

  static std::size_t heap_bytes(const GemmProblem& p, int rank) {
    return Timing::kHeapBytes + Tensors::heap_bytes(p, rank);
  }

  GemmResults run() {
    GemmResults results;
    results.right = on_all_ranks(comm_, p_.ranks, check());
    for (int round = 0; round < kRounds; ++round) {
      timing_.take_round(round, kRounds);
      for (std::size_t step = 0; step < ways_.size(); ++step) {
        timing_.measure(step, ways_[step].run);
      }
    }
    std::vector<std::vector<double>> seconds = timing_.collect();
    for (std::size_t step = 0; step < (seconds.empty() ? 0 : ways_.size()); ++step) {
      results.ways.push_back(ways_[step].about);
      results.ways.back().seconds = std::move(seconds[step]);
    }
    const xd_gemm_config config = context_config(p_);
    ok(xd_gemm_context_memory(&config, &results.memory));
    return results;
  }

 private:
  struct Way {
    GemmWay about;
    std::function<void()> run;
    bool ends_with_d;  // the result is complete in d
  };

  static constexpr int kRounds = 5;
  static Timing::Size timing_size(const GemmProblem& p) { return {kMostWays, p.iters, p.warmup}; }

  void add_steps() {
    ways_.push_back({{.name = kApart, .algo = {}}, [this] { steps_.both(); }, true});
    ways_.push_back({{.name = kProduct, .algo = {}}, [this] { steps_.product(); }, false});
    ways_.push_back({{.name = kTransfer, .algo = {}}, [this] { steps_.transfer(); }, false});
  }

  // An algorithm that cannot run here is left out.
  void add_algo(xd_gemm_algo algo, const char* name) {
    const xd_gemm_args args = args_of(algo);
    xd_gemm_plan_info plan = XD_GEMM_PLAN_INFO_INIT;
    const xd_status status = xd_gemm_explain(context_.get(), p_.shape.operation, &args, &plan);
    if (status == XD_ERROR_UNSUPPORTED) return;
    ok(status);
    ways_.push_back({{.name = name,
                      .algo = name_of(plan.algo),
                      .products = plan.num_products,
                      .estimate_us = plan.estimate_us},
                     [this, args] { call_gemm(p_, context_.get(), args, nullptr); },
                     true});
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

  // Collective. True if on this rank every way has exact sums, and the bits of the first.
  bool check() {
    const std::size_t bytes =
        static_cast<std::size_t>(tensors_.d.dl()->shape[0] * p_.shape.n) * p_.element_bytes();
    std::optional<std::uint64_t> first;
    bool right = true;
    for (const Way& way : ways_) {
      if (!way.ends_with_d) continue;
      std::memset(tensors_.d.data(), 0xff, bytes);
      way.run();
      std::string wrong = check_result(p_, rank_, tensors_.d.data());
      const std::uint64_t sum = checksum(tensors_.d.data(), bytes, 0);
      if (!first) first = sum;
      if (wrong.empty() && sum != *first) wrong = "other bits than " + ways_.front().about.name;
      if (wrong.empty()) continue;
      right = false;
      std::fprintf(stderr, "crossdock-bench: rank %d: %s: %s: %s\n", rank_, p_.shape.name.c_str(),
                   way.about.name.c_str(), wrong.c_str());
    }
    return right;
  }

  const GemmProblem& p_;
  const int rank_;
  xd_comm* const comm_;
  Timing timing_;  // first: see SharedBlock
  Tensors tensors_;
  const Context context_;
  const Steps steps_;
  const std::vector<std::int64_t> shares_;
  std::vector<Way> ways_;
};

}  // namespace

const char* name_of(xd_gemm_algo algo) {
  for (const auto& [known, name] : kGemmAlgos) {
    if (known == algo) return name;
  }
  return "?";
}

void call_gemm(const GemmProblem& problem, xd_gemm_context* context, const xd_gemm_args& args,
               xd_stream stream) {
  switch (problem.shape.operation) {
    case XD_GEMM_ALL_GATHER:
      return ok(xd_gemm_all_gather(context, &args, stream));
    case XD_GEMM_REDUCE_SCATTER:
      return ok(xd_gemm_reduce_scatter(context, &args, stream));
    default:
      return ok(xd_gemm_all_reduce(context, &args, stream));
  }
}

GemmResults run_gemm(const Launch& launch, int rank, const GemmProblem& problem) {
  const std::string name = "bench-gemm-" + problem.shape.name + std::to_string(problem.tokens);
  const Comm comm = make_comm(
      launch, rank, {.name = name.c_str(), .heap_bytes = GemmRun::heap_bytes(problem, rank)});
  return GemmRun(problem, rank, comm.get()).run();
}

}  // namespace bench
