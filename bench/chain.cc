#include "chain.h"

#include <algorithm>
#include <cctype>
#include <cstddef>
#include <cstdio>
#include <sstream>

#include "report.h"

namespace bench {
namespace {

constexpr double kWideSpread = 0.1;

struct Step {
  const char* name;
  std::function<void(int set)> enqueue;
};

// Collective.
std::vector<std::byte> drained(const Rank& at, const std::vector<Step>& steps, const Tensor& out,
                               int set) {
  for (const Step& step : steps) {
    step.enqueue(set);
    at.settle(step.name);
  }
  std::vector<std::byte> bytes(out.bytes());
  at.device.copy(bytes.data(), out.data(set), bytes.size());
  return bytes;
}

void poison(const Rank& at, const Tensor& out) {
  for (int set = 0; set < kChainSets; ++set) at.device.fill(out.data(set), 0xff, out.bytes());
  at.settle("poisoning");
}

ChainResult measure(const Rank& at, const Workload& w, int links, const std::vector<Step>& steps,
                    const Tensor& out) {
  const Iterations iterations{w.warmup, w.iters};
  ChainResult result;
  poison(at, out);
  std::vector<std::vector<std::byte>> expected;
  for (int set = 0; set < kChainSets; ++set) expected.push_back(drained(at, steps, out, set));
  for (const Step& step : steps) {
    const std::vector<double> slowest =
        at.time(iterations, [&](int i) { step.enqueue(i % kChainSets); });
    if (at.rank == 0) result.alone.push_back(percentile(slowest, 0.5));
  }
  poison(at, out);
  const auto link = [&](int number) {
    for (const Step& step : steps) step.enqueue(number % kChainSets);
  };
  const auto others = [&](int) {
    for (int number = 1; number < links; ++number) link(number);
  };
  std::vector<double> mine =
      at.watch.measure_parts(iterations, {{.body = others, .lead = [&] { link(0); }}});
  at.settle("the end of a chain");
  for (double& seconds : mine) seconds /= links - 1;
  bool equal = true;
  for (int set = 0; set < kChainSets; ++set) {
    std::vector<std::byte> got(out.bytes());
    at.device.copy(got.data(), out.data(set), got.size());
    equal = equal && got == expected[static_cast<std::size_t>(set)];
  }
  result.equal_bits = at.all(equal);
  for (const std::vector<double>& of_rank : at.gather(mine)) {
    result.periods.insert(result.periods.end(), of_rank.begin(), of_rank.end());
  }
  return result;
}

void fill(const Rank& at, const Workload& w, const Tensor& tokens) {
  std::vector<std::byte> bytes(tokens.bytes());
  fill_tokens(w, at.rank, bytes.data());
  at.device.copy(tokens.data(), bytes.data(), bytes.size());
}

double spread(const ChainResult& result) {
  return (percentile(result.periods, 0.9) - percentile(result.periods, 0.1)) /
         percentile(result.periods, 0.5);
}

Json row_of(const Chain& chain) {
  Json row = chain.fields;
  double sum = 0;
  for (std::size_t i = 0; i < chain.operations.size(); ++i) {
    const double alone = chain.result.alone[i];
    set_number(row, (std::string(chain.operations[i]) + "_us").c_str(), alone * 1e6, 3);
    sum += alone;
  }
  const double period = percentile(chain.result.periods, 0.5);
  set_number(row, "sum_us", sum * 1e6, 3);
  set_number(row, "period_us", period * 1e6, 3);
  set_number(row, "spread_percent", spread(chain.result) * 100, 3);
  set_number(row, "period_ratio", period / sum, 3);
  return row;
}

std::vector<Column> columns_of(const Chain& chain) {
  std::vector<Column> columns;
  for (const auto& [key, value] : chain.fields.items()) {
    columns.push_back({key.c_str(), key.c_str(), value.is_string() ? kText : 0});
  }
  static constexpr std::pair<const char*, Column> operations[] = {
      {"prepare", {"prepare_us", "prepare", 1}},
      {"dispatch", {"dispatch_us", "dispatch", 1}},
      {"combine", {"combine_us", "combine", 1}}};
  for (const auto& [name, column] : operations) {
    if (std::ranges::find(chain.operations, std::string_view(name)) != chain.operations.end()) {
      columns.push_back(column);
    }
  }
  columns.push_back({"sum_us", "sum", 1});
  columns.push_back({"period_us", "period us", 1});
  columns.push_back({"spread_percent", "spread %", 1});
  columns.push_back({"period_ratio", "of sum", 2});
  return columns;
}

}  // namespace

void complete_chain_option(std::vector<std::string>& arguments) {
  const auto option = std::ranges::find(arguments, "--chain");
  if (option == arguments.end()) return;
  const auto value = option + 1;
  if (value == arguments.end() || value->starts_with("--")) arguments.insert(value, "20");
}

std::size_t ep_chain_heap(const Workload& w, const Traffic& traffic) {
  return EpCalls::heap_bytes(w, traffic, 1, kChainSets, kChainSets) + (std::size_t{1} << 20);
}

ChainResult ep_chain(const Rank& at, const Workload& w, const Traffic& traffic, int links,
                     bool staged, int num_sms) {
  const EpInputs in(w, traffic, staged ? nullptr : at.comm, at.device);
  EpCalls calls(w, traffic, in, at.comm, at.device, staged, kChainSets, kChainSets);
  fill(at, w, in.tokens);
  calls.open(num_sms);
  std::vector<Step> steps;
  for (const Operation operation : {Operation::prepare, Operation::dispatch, Operation::combine}) {
    steps.push_back(
        {name_of(operation), [&calls, operation](int set) { calls.call(operation, set, set); }});
  }
  ChainResult result = measure(at, w, links, steps, calls.out());
  check_status(at.comm, calls.group(), xd_ep_group_status, xd_ep_status XD_EP_STATUS_INIT);
  return result;
}

ChainResult ll_chain(const Rank& at, const Workload& w, const Traffic& traffic, int links) {
  const EpInputs in(w, traffic, nullptr, at.device);
  LlCalls calls(w, at, in, kChainSets);
  fill(at, w, in.tokens);
  const std::vector<Step> steps{
      {"dispatch", [&](int set) { calls.dispatch(XD_LL_PHASE_BOTH, set); }},
      {"combine", [&](int set) { calls.combine(XD_LL_PHASE_BOTH, set); }}};
  ChainResult result = measure(at, w, links, steps, calls.out());
  calls.check_status();
  return result;
}

int report_chains(const std::string& title, const Machine& machine,
                  const std::vector<Chain>& chains, const std::string& json) {
  Machine known = machine;
  std::vector<Json> rows;
  bool right = true;
  int wide = 0;
  for (const Chain& chain : chains) {
    rows.push_back(row_of(chain));
    right = right && chain.result.equal_bits;
    wide += spread(chain.result) > kWideSpread ? 1 : 0;
  }
  if (wide != 0) {
    known.doubts.push_back(std::to_string(wide) + " of " + std::to_string(rows.size()) +
                           " chains are unsteady, their periods spread by more than 10 %");
  }
  print_head(title, known);
  std::printf("\n");
  print_table("", columns_of(chains.front()), rows);
  std::printf("\n");
  print_text("",
             "Microseconds. Operations: alone, from a common start to the end of the slowest rank, "
             "p50. period: of a batch in a chain, from the end of its first to that of its last, "
             "the median over ranks and trials; spread: from their 10th to their 90th percentile, "
             "of it; of sum: the period over the sum of the operations alone.");
  std::printf("%s\n", right ? "Checked: the outputs of chains equal those of operations that were "
                              "waited for, in every bit."
                            : "WRONG: chains end with other bits than operations that were waited "
                              "for.");
  if (!json.empty()) {
    Json all = head(title, known);
    all["rows"] = rows;
    write_file(all, json);
  }
  return right ? 0 : 1;
}

int run_ep_chain_on_cpu(const Launch& launch, const Options& options) {
  const Workload& w = options.workload;
  const int links = options.driver.chain;
  const Machine machine = describe_machine(launch.num_ranks);
  std::vector<Chain> chains;  // on rank 0
  const int failures = run_ranks(launch, [&](int rank) {
    const Traffic traffic = traffic_of(w, make_routing(w), rank);
    for (const bool staged : {false, true}) {
      if (!(staged ? options.driver.staged : options.driver.zero_copy)) continue;
      const char* const by = staged ? "staged" : "zero-copy";
      const std::string name = std::string("bench-chain-") + by;
      const Comm comm =
          make_comm(launch, rank,
                    {.name = name.c_str(),
                     .heap_bytes = HostStopwatch::kHeapBytes + ep_chain_heap(w, traffic)});
      HostStopwatch watch(comm.get(), rank);
      const Rank at{rank, w.ranks, comm.get(), host(), watch};
      ChainResult result = ep_chain(at, w, traffic, links, staged, 0);
      if (rank != 0) continue;
      chains.push_back({{std::begin(kEpChain), std::end(kEpChain)}, {{"by", by}}, result});
    }
  });
  if (failures != 0) return 1;
  if (launch.first_rank != 0) return 0;
  return report_chains(ep_chain_title(w, links), machine, chains, options.driver.json);
}

std::string chain_title(const char* command, const Workload& w, int links,
                        const std::string& more) {
  std::ostringstream text;
  text << "crossdock-bench " << command << ": chains of " << links << " batches, " << w.ranks
       << " ranks, H=" << w.hidden << " K=" << w.topk << " E=" << w.experts << more << ", routing "
       << w.routing << ", seed " << w.seed << ", " << w.iters << " trials";
  return text.str();
}

std::string ep_chain_title(const Workload& w, int links) {
  return chain_title("ep", w, links,
                     " T=" + std::to_string(w.tokens) + ' ' + name_of(w.element) + ", " +
                         name_of(w.layout) + "-major");
}

}  // namespace bench
