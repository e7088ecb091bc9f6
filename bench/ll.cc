#include "ll.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <stdexcept>

#include "chain.h"
#include "ll_run.h"
#include "machine.h"
#include "option.h"
#include "report.h"
#include "table.h"
#ifdef XD_CUDA
#include "gpu/chain_cuda.h"
#include "gpu/ll_cuda.h"
#include "gpu/machine.h"
#include "gpu/rank.h"
#endif

namespace bench {
namespace {

struct LlOptions {
  std::vector<int> tokens{1, 8, 16, 32, 64, 128, 256, 512};
  std::vector<int> sms{0};
  Workload workload;  // of one number of tokens, and one budget
  Device device = Device::cpu;
  int chain = 0;  // batches of a chain; 0 = none: single operations
  std::string json;
};

// The results of one number of tokens, and one budget.
struct LlCase {
  Workload workload;
  LlResults results;
};

LlOptions parse(std::vector<std::string> arguments, int ranks) {
  complete_chain_option(arguments);
  LlOptions options;
  Workload& w = options.workload;
  w.hidden = 7168;
  w.experts = 256;
  w.ranks = ranks;
  CLI::App app;
  app.set_help_flag();
  app.add_option("--tokens", options.tokens)
      ->delimiter(',')
      ->check(CLI::Range(1, XD_LL_MAX_TOKENS));
  app.add_option("--sms", options.sms)->delimiter(',')->check(CLI::Range(0, 1024));
  number(app, "--hidden", w.hidden, 1, kMost);
  number(app, "--topk", w.topk, 1, kMost);
  number(app, "--experts", w.experts, 1, kMost);
  number(app, "--iters", w.iters, 1, kMost);
  number(app, "--warmup", w.warmup, 0, kMost);
  number(app, "--seed", w.seed, std::uint64_t{0}, UINT64_MAX);
  number(app, "--alignment", w.alignment, 1, 1 << 20);
  word(app, "--receive", w.receive, {Receive::slots, Receive::by_expert, Receive::by_rank});
  word(app, "--device", options.device, {Device::cpu, Device::cuda});
  number(app, "--chain", options.chain, 2, kMost);
  app.add_flag("--tables", w.tables);
  app.add_option("--routing", w.routing);
  app.add_option("--json", options.json);
  parse_all(app, std::move(arguments));
  if (w.iters == 0) w.iters = 200;
  if (w.warmup < 0) w.warmup = 20;
  if (w.receive == Receive::by_rank) w.layout = Layout::rank;
  check(w);
  if (w.alignment != 1 && w.receive != Receive::by_expert) {
    throw std::invalid_argument("--alignment " + std::to_string(w.alignment) +
                                ": expected --receive by_expert with it");
  }
  if (w.hidden % 128 != 0) {
    throw std::invalid_argument("--hidden " + std::to_string(w.hidden) +
                                ": expected a multiple of 128, the columns of one scale");
  }
  if (options.sms != std::vector<int>{0} && (options.device == Device::cpu || options.chain != 0)) {
    throw std::invalid_argument("--sms: expected --device cuda, and no --chain, with it");
  }
#ifndef XD_CUDA
  if (options.device == Device::cuda) {
    throw std::runtime_error("--device cuda: this program was built without CUDA");
  }
#endif
  return options;
}

// The median of a way that takes three calls, for the low-latency step that does the same; 0 =
// there is none.
double median_by(const LlCase& one, const std::string& way, const LlStep& step) {
  const std::string operation = step.operation;
  const bool all = operation == "dispatch + combine";
  for (const LlTimes& times : one.results.times) {
    if (way != times.step.by) continue;
    if (times.step.operation == (all ? "prepare + dispatch + combine" : operation)) {
      return percentile(times.seconds, 0.5);
    }
  }
  return 0;
}

std::vector<Json> rows_of(const LlCase& one) {
  std::vector<Json> rows;
  for (const LlTimes& times : one.results.times) {
    const double p50 = percentile(times.seconds, 0.5);
    Json row{{"tokens", one.workload.tokens},
             {"operation", times.step.operation},
             {"by", times.step.by},
             {"rows", times.step.rows},
             {"clock", times.step.clock}};
    set_number(row, "p50_us", p50 * 1e6, 3);
    set_number(row, "p99_us", percentile(times.seconds, 0.99) * 1e6, 3);
    if (times.sms != 0) row["sms"] = times.sms;
    if (one.workload.sms != 0) row["sms_allowed"] = one.workload.sms;
    const bool ours = times.step.by == one.results.times.front().step.by;
    for (const auto& [key, way] :
         {std::pair{"zero_copy_ratio", "zero-copy"}, std::pair{"staged_ratio", "staged"}}) {
      const double theirs = ours ? median_by(one, way, times.step) : 0;
      if (theirs != 0) set_number(row, key, theirs / p50, 3);
    }
    rows.push_back(std::move(row));
  }
  return rows;
}

std::string title(const LlOptions& options, bool threads) {
  const Workload& w = options.workload;
  std::ostringstream text;
  text << "crossdock-bench ll: " << w.ranks << (threads ? " threads" : " processes")
       << ", received " << name_of(w.receive) << ", H=" << w.hidden << " K=" << w.topk
       << " E=" << w.experts << (w.tables ? ", tables" : "") << ", routing " << w.routing
       << ", seed " << w.seed << ", " << w.iters << " iterations";
  return text.str();
}

struct LlReport {
  Machine machine;
  LlOptions options;
  bool threads;
  std::vector<LlCase> cases;

  std::vector<Json> rows() const {
    std::vector<Json> all;
    for (const LlCase& one : cases) {
      for (Json& row : rows_of(one)) all.push_back(std::move(row));
    }
    return all;
  }
};

void print(const LlReport& report) {
  print_head(title(report.options, report.threads), report.machine);
  const bool cuda = report.options.device == Device::cuda;
  std::vector<Column> columns{
      {"operation", "operation", kText}, {"by", "by", kText}, {"rows", "rows", kText}};
  if (cuda) columns.push_back({"clock", "clock", kText});
  columns.push_back({"p50_us", "p50 us", 1});
  columns.push_back({"p99_us", "p99 us", 1});
  if (cuda) {
    columns.push_back({"sms", "SMs"});
  } else {
    columns.push_back({"zero_copy_ratio", "zero-copy", 2});
    columns.push_back({"staged_ratio", "staged", 2});
  }
  for (const LlCase& one : report.cases) {
    const xd_ll_memory& memory = one.results.memory;
    const int sms = one.workload.sms;
    std::printf("\n%d tokens per rank%s; a group takes %.1f MB per rank\n", one.workload.tokens,
                sms == 0 ? "" : (", at most " + std::to_string(sms) + " SMs").c_str(),
                static_cast<double>(memory.symmetric_bytes + memory.private_bytes) * 1e-6);
    print_table("", columns, rows_of(one));
  }
  if (cuda) {
    std::printf("\n");
    print_text(
        "",
        "Times run from a common start to the end of the slowest rank. kernel: by the device's "
        "clock, less an empty kernel in its place; graph: each of 20 operations in a CUDA graph. "
        "SMs: multiprocessors that the operation's kernel holds while it runs.");
    return;
  }
  std::printf("\n");
  print_text(
      "",
      "Times run from a common start to the end of the slowest rank. By zero-copy and staged: "
      "calls of the layout of ep.h that do the same; with what it receives in symmetric "
      "memory, "
      "or in ordinary memory, where low latency has it. In their columns: their p50 over this one. "
      "Between dispatch and combine each rank reads and writes the rows that it has received, as "
      "experts do; that is not timed.");
}

void write_json(const LlReport& report) {
  const Workload& w = report.options.workload;
  Json json = head(title(report.options, report.threads), report.machine);
#ifdef XD_CUDA
  if (report.options.device == Device::cuda) json["gpus"] = gpu::to_json(gpu::describe_gpus());
#endif
  json.update({{"ranks", w.ranks},
               {"threads", report.threads},
               {"receive", name_of(w.receive)},
               {"alignment", w.alignment},
               {"hidden", w.hidden},
               {"topk", w.topk},
               {"experts", w.experts},
               {"tables", w.tables},
               {"routing", w.routing},
               {"seed", w.seed},
               {"iterations", w.iters},
               {"rows", report.rows()}});
  write_file(json, report.options.json);
}

// Prints all; returns the exit code.
int finish(const LlReport& report) {
  print(report);
  if (!report.options.json.empty()) write_json(report);
  const bool right =
      std::ranges::all_of(report.cases, [](const LlCase& one) { return one.results.equal_bits; });
  const bool cuda = report.options.device == Device::cuda;
  std::printf("%s\n", !right ? "WRONG: the ways end with different bits."
                      : cuda ? "Checked: the sums of all tokens, before the times and after them."
                             : "Checked: all ways end with equal bits on every rank.");
  return right ? 0 : 1;
}

LlResults run_on(Device device, const Launch& launch, int rank, const Workload& workload) {
#ifdef XD_CUDA
  if (device == Device::cuda) return gpu::run_ll(launch, rank, workload);
#endif
  static_cast<void>(device);
  return run_ll(launch, rank, workload);
}

ChainResult chain_on(Device device, const Launch& launch, int rank, const Workload& w, int links) {
  const Traffic traffic = traffic_of(w, make_routing(w), rank);
#ifdef XD_CUDA
  if (device == Device::cuda) return gpu::run_ll_chain(launch, rank, w, traffic, links);
#endif
  static_cast<void>(device);
  const std::string name = "bench-ll-chain-" + std::to_string(w.tokens);
  const Comm comm = make_comm(
      launch, rank,
      {.name = name.c_str(), .heap_bytes = HostStopwatch::kHeapBytes + (std::size_t{1} << 20)});
  HostStopwatch watch(comm.get(), rank);
  return ll_chain({rank, w.ranks, comm.get(), host(), watch}, w, traffic, links);
}

int run_chains(const Launch& launch, const LlReport& report) {
  const LlOptions& options = report.options;
  std::vector<Chain> chains;  // on rank 0
  for (const int tokens : options.tokens) {
    Workload workload = options.workload;
    workload.tokens = tokens;
    const int failures = run_ranks(launch, [&](int rank) {
      ChainResult result = chain_on(options.device, launch, rank, workload, options.chain);
      if (rank != 0) return;
      chains.push_back({{std::begin(kLlChain), std::end(kLlChain)}, {{"tokens", tokens}}, result});
    });
    if (failures != 0) return 1;
  }
  if (launch.first_rank != 0) return 0;
  return report_chains(chain_title("ll", options.workload, options.chain, " bf16"), report.machine,
                       chains, options.json);
}

}  // namespace

const char* ll_help() {
  return R"(usage: crossdock-run -n N [--threads] crossdock-bench ll [options]

Times low-latency dispatch and combine, whole and in halves, bf16 and quantised,
every iteration with a common start; a time is the maximum over the ranks. Beside
it: prepare, dispatch and combine of the expert-major layout (by_rank: of the
rank-major one), on the same tokens.

  --tokens N,N,...  per rank (1,8,16,32,64,128,256,512)
  --hidden N        elements of a row (7168)  --experts N   in all (256)
  --topk N          experts of a token (8)    --routing R   as crossdock-bench ep (uniform)
  --iters N         timed iterations (200)    --warmup N    before them (20)
  --receive F       slots, by_expert or by_rank: the form of received rows (slots)
  --alignment N     of by_expert's zones (1)
  --tables          a table of slots stands between ids and experts
  --json FILE       write the tables' rows    --seed N      of routing and data (1)
  --sms N,N,...     CUDA: budgets of the group, one after another; 0 = the library's
                    choice, with the floors (0)
  --chain N         the period of a batch in streams of N (20) times dispatch and
                    combine, beside the times of these alone
  --device cuda     on GPUs: time in kernel, by events, and in CUDA graphs, and the
                    multiprocessors held; beside a plain put of the same bytes, and
                    NCCL where it is found
)";
}

int run_ll_command(const std::vector<std::string>& arguments) {
  const Launch launch = read_launch();
  LlReport report{.machine = describe_machine(launch.num_ranks),
                  .options = parse(arguments, launch.num_ranks),
                  .threads = launch.threads,
                  .cases = {}};
#ifdef XD_CUDA
  if (report.options.device == Device::cuda) gpu::set_up_environment(/*eager=*/true);
#endif
  if (report.options.chain != 0) return run_chains(launch, report);
  for (const int tokens : report.options.tokens) {
    for (const int sms : report.options.sms) {
      LlCase one{.workload = report.options.workload, .results = {}};
      one.workload.tokens = tokens;
      one.workload.sms = sms;
      LlResults on_rank_0;
      const int failures = run_ranks(launch, [&](int rank) {
        LlResults results = run_on(report.options.device, launch, rank, one.workload);
        if (rank == 0) on_rank_0 = std::move(results);
      });
      if (failures != 0) return 1;
      one.results = std::move(on_rank_0);
      report.cases.push_back(std::move(one));
    }
  }
  return launch.first_rank == 0 ? finish(report) : 0;
}

}  // namespace bench
