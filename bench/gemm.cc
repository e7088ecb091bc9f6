#include "gemm.h"

#include <algorithm>
#include <cstdio>
#include <iomanip>
#include <sstream>
#include <stdexcept>

#include "gemm/run.h"
#include "machine.h"
#include "option.h"
#include "report.h"
#include "table.h"
#ifdef XD_CUDA
#include "gpu/gemm_cuda.h"
#include "gpu/rank.h"
#endif

namespace bench {
namespace {

struct GemmOptions {
  std::vector<std::string> names{"all_gather:1024x1024", "reduce_scatter:1024x1024",
                                 "all_reduce:1024x1024"};
  std::vector<int> tokens{1024};
  GemmProblem problem;  // of one shape and number of tokens
  Device device = Device::cpu;
  std::string json;
};

struct GemmCase {
  GemmProblem problem;
  GemmResults results;
};

struct GemmReport {
  Machine machine;
  GemmOptions options;
  bool threads;
  std::vector<GemmCase> cases;
};

GemmOptions parse(std::vector<std::string> arguments, int ranks) {
  GemmOptions options;
  GemmProblem& p = options.problem;
  p.ranks = ranks;
  p.iters = 30;
  p.warmup = 5;
  CLI::App app;
  app.set_help_flag();
  app.add_option("--shapes", options.names)->delimiter(',');
  app.add_option("--tokens", options.tokens)->delimiter(',')->check(CLI::Range(1, kMost));
  number(app, "--iters", p.iters, 1, kMost);
  number(app, "--warmup", p.warmup, 0, kMost);
  number(app, "--seed", p.seed, std::uint64_t{0}, UINT64_MAX);
  word(app, "--dtype", p.element, {Element::bf16, Element::fp16, Element::fp32});
  word(app, "--device", options.device, {Device::cpu, Device::cuda});
  app.add_flag("--cublasmp", p.cublasmp);
  app.add_option("--json", options.json);
  parse_all(app, std::move(arguments));
  const bool cuda = options.device == Device::cuda;
  if (p.cublasmp && !cuda) throw std::invalid_argument("--cublasmp: expected --device cuda");
#ifndef XD_CUDA
  if (cuda) throw std::runtime_error("--device cuda: this program was built without CUDA");
#endif
  if (cuda && app.count("--dtype") == 0) p.element = Element::bf16;
  if (cuda && app.count("--tokens") == 0) options.tokens = {2048};
  if (cuda && app.count("--shapes") == 0) options.names = {"70b"};
  return options;
}

// Every shape with every number of tokens.
std::vector<GemmProblem> problems_of(const GemmOptions& options) {
  std::vector<GemmProblem> problems;
  for (const std::string& name : options.names) {
    for (const GemmShape& shape : read_shapes(name, options.problem.ranks)) {
      for (const int tokens : options.tokens) {
        problems.push_back(options.problem);
        problems.back().shape = shape;
        problems.back().tokens = tokens;
      }
      const auto elements = static_cast<std::int64_t>(16 / options.problem.element_bytes());
      if (shape.n % elements != 0 || shape.k % elements != 0) {
        throw std::invalid_argument("--shapes " + shape.name + ": expected N and K of a multiple " +
                                    "of " + std::to_string(elements) + ", rows of 16 bytes");
      }
    }
  }
  return problems;
}

double median(const GemmResults& results, const char* name) {
  const auto way = std::ranges::find(results.ways, name, &GemmWay::name);
  return way == results.ways.end() ? 0 : percentile(way->seconds, 0.5);
}

// The part of the shorter step that is hidden behind the longer one: 1 = all of it.
double overlap(const GemmResults& results, double p50) {
  return (median(results, kApart) - p50) /
         std::min(median(results, kProduct), median(results, kTransfer));
}

Json row_of(const GemmCase& one, const GemmWay& way) {
  const GemmProblem& p = one.problem;
  const double p50 = percentile(way.seconds, 0.5);
  Json row{{"shape", p.shape.name}, {"operation", name_of(p.shape.operation)},
           {"tokens", p.tokens},    {"n", p.shape.n},
           {"k", p.shape.k},        {"way", way.name}};
  const bool ours = !way.algo.empty();
  if (ours) {
    row["algo"] = way.algo;
    row["products"] = way.products;
  }
  if (ours && !way.name.starts_with("CUBLASMP")) {
    row["memory_bytes"] = one.results.memory.symmetric_bytes + one.results.memory.private_bytes;
    set_number(row, "estimate_us", way.estimate_us, 3);
  }
  set_number(row, "host_us", way.host_us, 1);
  set_number(row, "p50_us", p50 * 1e6, 3);
  set_number(row, "p99_us", percentile(way.seconds, 0.99) * 1e6, 3);
  if (way.name != kTransfer) set_number(row, "gflop_per_s", p.flop() / p50 * 1e-9, 3);
  if (way.name != kTransfer && way.name != kProduct) {
    set_number(row, "floor_ratio", p50 / median(one.results, kProduct), 3);
  }
  if (ours && median(one.results, kApart) > 0) {
    set_number(row, "peer_ratio", median(one.results, kApart) / p50, 3);
    if (p.ranks > 1) set_number(row, "overlap", overlap(one.results, p50), 3);
  }
  return row;
}

std::vector<Json> rows_of(const GemmCase& one) {
  std::vector<Json> rows;
  for (const GemmWay& way : one.results.ways) rows.push_back(row_of(one, way));
  return rows;
}

std::string title(const GemmReport& report) {
  const GemmProblem& p = report.options.problem;
  std::ostringstream text;
  text << "crossdock-bench gemm: " << p.ranks << (report.threads ? " threads" : " processes")
       << ", " << name_of(p.element) << ", seed " << p.seed << ", " << p.iters << " iterations";
  return text.str();
}

void print(const GemmReport& report) {
  print_head(title(report), report.machine);
  std::vector<Column> columns{
      {"way", "way", kText},        {"algo", "algorithm", kText}, {"products", "parts"},
      {"p50_us", "p50 us", 1},      {"p99_us", "p99 us", 1},      {"gflop_per_s", "Gflop/s", 1},
      {"floor_ratio", "x prod", 2}, {"overlap", "overlap", 2},    {"peer_ratio", "faster", 2}};
  const bool cuda = report.options.device == Device::cuda;
  if (cuda) {
    columns.push_back({"estimate_us", "estimate", 1});
    columns.push_back({"host_us", "host us", 1});
  }
  for (const GemmCase& one : report.cases) {
    const GemmProblem& p = one.problem;
    const xd_gemm_memory& memory = one.results.memory;
    std::ostringstream product;
    product << p.shape.name << ", " << name_of(p.shape.operation) << ": [" << p.tokens << ","
            << p.shape.k << "] times [" << p.shape.k << "," << p.shape.n << "]; a context takes "
            << std::fixed << std::setprecision(1)
            << static_cast<double>(memory.symmetric_bytes + memory.private_bytes) * 1e-6
            << " MB per rank";
    std::printf("\n");
    print_text("", product.str());
    print_table("", columns, rows_of(one));
  }
  std::printf("\n");
  print_text(
      "",
      "Times run from a common start to the end of the slowest rank; the ways take rounds in "
      "turn. x prod: p50 over that of the product alone. overlap: the part of the shorter step "
      "that is hidden behind the longer one. faster: p50 of the steps one after the other over "
      "this one. Gflop/s are of one rank.");
  if (cuda) {
    print_text(
        "",
        "The product alone is cuBLASLt's, by the fastest of its algorithms; the transfer is "
        "NCCL's. SMs: multiprocessors that the transfer takes from products. host us: p50 of "
        "what the call takes on the host of rank 0.");
  }
  if (report.options.problem.cublasmp) {
    print_text(
        "",
        "CUBLASMP: from a context of its own, whose memory is not counted. Its calls wait on "
        "the host for those of all ranks: that is in host us, and not in the other times.");
  }
}

void write_json(const GemmReport& report) {
  const GemmProblem& p = report.options.problem;
  std::vector<Json> rows;
  for (const GemmCase& one : report.cases) {
    for (Json& row : rows_of(one)) rows.push_back(std::move(row));
  }
  Json json = head(title(report), report.machine);
#ifdef XD_CUDA
  if (report.options.device == Device::cuda) json.update(gpu::describe_gemm());
#endif
  json.update({{"ranks", p.ranks},
               {"threads", report.threads},
               {"dtype", name_of(p.element)},
               {"seed", p.seed},
               {"iterations", p.iters},
               {"rows", rows}});
  write_file(json, report.options.json);
}

// Prints all; returns the exit code.
int finish(const GemmReport& report) {
  print(report);
  if (!report.options.json.empty()) write_json(report);
  const bool right =
      std::ranges::all_of(report.cases, [](const GemmCase& one) { return one.results.right; });
  print_text("", right ? "Checked: all ways end with equal bits on every rank, and with exact sums "
                         "where looked at."
                       : "WRONG: see above.");
  return right ? 0 : 1;
}

GemmResults run_on(Device device, const Launch& launch, int rank, const GemmProblem& problem) {
#ifdef XD_CUDA
  if (device == Device::cuda) return gpu::run_gemm(launch, rank, problem);
#endif
  static_cast<void>(device);
  return run_gemm(launch, rank, problem);
}

}  // namespace

const char* gemm_help() {
  return R"(usage: crossdock-run -n N [--threads] crossdock-bench gemm [options]

Times products of matrices that are spread over the ranks, by every algorithm that
can run here, every iteration with a common start; a time is the maximum over the
ranks. Beside them, in the same run: the product and the transfer, each alone, and
both one after the other.

  --shapes S,S,...  70b or 8b, a model's layers; 70b.qkv, .o_proj, .fc1, .fc2,
                    .fc2_all_reduce; or all_gather:NxK, reduce_scatter:NxK and
                    all_reduce:NxK with sizes of a rank (each with 1024x1024)
  --tokens M,M,...  of all ranks together (1024)
  --dtype D         bf16, fp16, fp32 (fp32)
  --iters N         timed iterations (30)     --warmup N    before them (5)
  --json FILE       write the tables' rows    --seed N      of the data (1)
  --device cuda     on GPUs (bf16, 70b, 2048 tokens unless said otherwise): each
                    algorithm by calls and as a CUDA graph; beside them cuBLASLt's
                    product, NCCL's transfer, and both one after the other
  --cublasmp        with --device cuda: also NVIDIA's cuBLASMp, by calls; what it
                    refuses is named and left out
)";
}

int run_gemm_command(const std::vector<std::string>& arguments) {
  const Launch launch = read_launch();
  GemmReport report{.machine = describe_machine(launch.num_ranks),
                    .options = parse(arguments, launch.num_ranks),
                    .threads = launch.threads,
                    .cases = {}};
#ifdef XD_CUDA
  // cuBLASLt is too large to be loaded as a whole: every way runs once before it is measured.
  if (report.options.device == Device::cuda) gpu::set_up_environment(/*eager=*/false);
#endif
  for (const GemmProblem& problem : problems_of(report.options)) {
    GemmResults on_rank_0;
    const int failures = run_ranks(launch, [&](int rank) {
      GemmResults results = run_on(report.options.device, launch, rank, problem);
      if (rank == 0) on_rank_0 = std::move(results);
    });
    if (failures != 0) return 1;
    report.cases.push_back({problem, std::move(on_rank_0)});
  }
  return launch.first_rank == 0 ? finish(report) : 0;
}

}  // namespace bench
