// crossdock-bench: times the library's operations. ep: beside MPI and a plain copy. ll: those of
// low latency, beside those of another layout. gemm: products overlapped with transfers, beside the
// same two steps one after the other.
#include <algorithm>
#include <cstdio>
#include <map>
#include <stdexcept>

#include "chain.h"
#include "ep_run.h"
#include "gemm.h"
#include "ll.h"
#include "peer.h"
#include "report.h"
#ifdef XD_CUDA
#include "gpu/chain_cuda.h"
#include "gpu/driver.h"
#endif

namespace {

using namespace bench;

TableRow table_row(const char* operation, const char* by, const std::vector<double>& seconds) {
  return {.operation = operation,
          .by = by,
          .p50 = percentile(seconds, 0.50),
          .p99 = percentile(seconds, 0.99),
          .moves_rows = std::string(operation) != "prepare"};
}

// Returns the floor, the faster of the two kinds of copy.
TableRow add_library(Report& report, const char* by, const EpResults& results) {
  TableRow floor = table_row("copy", "cached", results.seconds[kOperations]);
  const TableRow streaming = table_row("copy", "streaming", results.seconds[kOperations + 1]);
  if (streaming.p50 < floor.p50) floor = streaming;
  for (std::size_t i = 0; i < kOperations; ++i) {
    report.rows.push_back(table_row(kOperationNames[i], by, results.seconds[i]));
  }
  return floor;
}

// Returns the times of the faster of the two kinds of store.
const std::vector<double>& faster(const std::vector<std::vector<double>>& variants) {
  return percentile(variants[0], 0.5) <= percentile(variants[1], 0.5) ? variants[0] : variants[1];
}

void add_peer(Report& report, const PeerResults& peer) {
  if (!peer.unavailable.empty()) {
    report.notes.push_back("MPI peer skipped: " + peer.unavailable);
    return;
  }
  for (const auto& [operation, variants] :
       {std::pair{"dispatch", &peer.dispatch}, std::pair{"combine", &peer.combine}}) {
    const TableRow row = table_row(operation, "MPI", faster(*variants));
    for (TableRow& ours : report.rows) {
      if (ours.operation == operation) ours.mpi_ratio = row.p50 / ours.p50;
    }
    report.rows.push_back(row);
  }
  double sent = 0;
  for (const std::int64_t rows : peer.sent_rows) sent += static_cast<double>(rows);
  char text[256];
  std::snprintf(
      text, sizeof(text),
      "MPI: %s, shared memory; pack + MPI_Alltoallv + unpack, %.0f rows sent per rank, %s.",
      peer.version.c_str(), sent / report.workload.ranks,
      report.workload.layout == Layout::expert
          ? "unpacked into the same expert zones, rows summed before they go back"
          : "received in the final order, nothing to unpack");
  report.notes.emplace_back(text);
}

// True if the peer moved and summed the same rows, bit for bit.
bool same_results(const EpResults& ours, const PeerResults& peer) {
  return !peer.unavailable.empty() ||
         (ours.recv_checksums == peer.recv_checksums && ours.out_checksums == peer.out_checksums);
}

// Slow iterations that dwarf the median come from a machine that does something else as well.
void add_doubt_of_spread(Report& report) {
  const auto wide = std::count_if(report.rows.begin(), report.rows.end(),
                                  [](const TableRow& row) { return row.p99 > 3 * row.p50; });
  if (wide == 0) return;
  report.machine.doubts.push_back(std::to_string(wide) + " of " +
                                  std::to_string(report.rows.size()) +
                                  " rows are unsteady, p99 > 3 * p50: ratios mean little");
}

// Completes the report of rank 0's measurements; returns the exit code.
int finish(Report report, const DriverOptions& driver, const std::vector<std::string>& arguments,
           const std::map<std::string, EpResults>& measured) {
  TableRow floor;
  floor.p50 = 1e9;
  for (const auto& [by, results] : measured) {
    const TableRow copy = add_library(report, by.c_str(), results);
    if (copy.p50 < floor.p50) floor = copy;
  }
  bool right = true;
  if (!driver.no_peer) {
    const PeerResults peer = run_peer(report.workload.ranks, arguments);
    add_peer(report, peer);
    for (const auto& [by, results] : measured) right = right && same_results(results, peer);
    if (peer.unavailable.empty()) {
      report.notes.emplace_back(
          right ? "Checked: MPI and the library end with equal bits on every rank."
                : "WRONG: MPI and the library end with different bits.");
    }
  }
  report.rows.push_back(floor);
  for (TableRow& row : report.rows) {
    if (row.moves_rows) row.floor_ratio = row.p50 / floor.p50;
  }
  add_doubt_of_spread(report);
  print(report);
  if (!driver.json.empty()) write_json(report, driver.json);
  return right ? 0 : 1;
}

int run_on_cpu(const std::vector<std::string>& arguments) {
  const Launch launch = read_launch();
  const Options options = parse_options(arguments, launch.num_ranks);
  if (options.workload.combine_wire != XD_EP_WIRE_SAME) {
    throw std::invalid_argument("--combine-wire: expected same without --device cuda");
  }
  Report report{
      .machine = describe_machine(launch.num_ranks),  // asked before this run loads the machine
      .workload = options.workload,
      .volume = volume_of(options.workload),
      .threads = launch.threads};
  std::map<std::string, EpResults> measured;  // on rank 0
  const int failures = run_ranks(launch, [&](int rank) {
    for (const bool staged : {false, true}) {
      if (!(staged ? options.driver.staged : options.driver.zero_copy)) continue;
      EpResults results = run_ep(launch, rank, options.workload, staged);
      if (rank == 0) measured[staged ? "staged" : "zero-copy"] = std::move(results);
    }
  });
  if (failures != 0) return 1;
  if (launch.first_rank != 0) return 0;
  return finish(std::move(report), options.driver, arguments, measured);
}

int run_ep_command(const std::vector<std::string>& given) {
  std::vector<std::string> arguments = given;
  complete_chain_option(arguments);
  const Options options = parse_options(arguments);
  if (options.driver.device == Device::cpu) {
    if (options.driver.chain == 0) return run_on_cpu(arguments);
    const Launch launch = read_launch();
    return run_ep_chain_on_cpu(launch, parse_options(arguments, launch.num_ranks));
  }
#ifdef XD_CUDA
  if (options.driver.chain != 0) return gpu::run_ep_chain(options);
  return gpu::run_on_cuda(options);
#else
  throw std::runtime_error("--device cuda: this program was built without CUDA");
#endif
}

struct Command {
  const char* name;
  const char* (*help)();
  int (*run)(const std::vector<std::string>& arguments);
};
constexpr Command kCommands[] = {{"ep", options_help, run_ep_command},
                                 {"ll", ll_help, run_ll_command},
                                 {"gemm", gemm_help, run_gemm_command}};

int run(const Command& command, const std::vector<std::string>& arguments) {
  if (!arguments.empty() && (arguments[0] == "--help" || arguments[0] == "-h")) {
    std::fputs(command.help(), stdout);
    return 0;
  }
  try {
    return command.run(arguments);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "crossdock-bench %s: %s\n", command.name, error.what());
    return dynamic_cast<const std::invalid_argument*>(&error) ? 2 : 1;
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::vector<std::string> words(argv + 1, argv + argc);
  const std::string first = words.empty() ? "" : words[0];
  for (const Command& command : kCommands) {
    if (first == command.name) return run(command, {words.begin() + 1, words.end()});
  }
  const bool help = first == "--help" || first == "-h";
  for (const Command& command : kCommands) std::fputs(command.help(), help ? stdout : stderr);
  return help ? 0 : 2;
}
