#include "case_report.h"

#include <algorithm>
#include <cstdio>
#include <sstream>
#include <stdexcept>

#include "../report.h"

namespace bench::gpu {
namespace {

double p50(const std::vector<double>& seconds) {
  return seconds.empty() ? 0 : percentile(seconds, 0.50);
}
double p99(const std::vector<double>& seconds) {
  return seconds.empty() ? 0 : percentile(seconds, 0.99);
}

// "-" where there is no value.
std::string cell(double value, int decimals) { return value == 0 ? "-" : number(value, decimals); }
std::string microseconds(double seconds) { return cell(seconds * 1e6, 1); }

// The multiprocessors that a step took; if unknown, those that it was allowed.
std::string sms_text(const StepResult& step) {
  const int sms = step.blocks != 0 ? step.blocks : step.step.sms;
  return sms == 0 ? "auto" : std::to_string(sms);
}

const char* memory_name(const Case& one) { return one.staged ? "staged" : "zero-copy"; }

// The content of one line of a table and of the JSON file.
struct Line {
  std::string operation;
  std::string sms = "-";
  const std::vector<double>* seconds;
  bool moves_rows = true;
};

// Bytes of a batch, as means over the ranks.
struct Bytes {
  Bytes(const Workload& w, const Volume& of_batch)
      : volume(of_batch), row(static_cast<double>(w.wire_row_bytes())) {}
  double wire() const { return volume.sent_rows * row; }
  double all() const { return volume.all_rows * row; }
  Volume volume;
  double row;
};

double gigabytes_per_second(double bytes, double seconds) {
  return seconds == 0 ? 0 : bytes / seconds * 1e-9;
}

void print_line(const Line& line, const Bytes& bytes, const CaseResult& result) {
  const double mine = p50(*line.seconds);
  const bool rated = line.moves_rows && mine != 0;
  const double floor = p50(result.floor.seconds), nccl = p50(result.nccl);
  std::printf(
      "  %-32s %5s %10s %10s %10s %10s %8s %10s\n", line.operation.c_str(), line.sms.c_str(),
      microseconds(mine).c_str(), microseconds(p99(*line.seconds)).c_str(),
      cell(rated ? gigabytes_per_second(bytes.wire(), mine) : 0, 1).c_str(),
      cell(rated ? gigabytes_per_second(bytes.all(), mine) : 0, 1).c_str(),
      cell(rated ? 100 * floor / mine : 0, 1).c_str(), cell(rated ? nccl / mine : 0, 2).c_str());
}

std::string title(const Case& one) {
  const Workload& w = one.workload;
  std::ostringstream text;
  text << "T=" << w.tokens << " H=" << w.hidden << " K=" << w.topk << " E=" << w.experts << ' '
       << name_of(w.element) << ", " << name_of(w.layout) << "-major";
  if (w.alignment != 1) text << ", alignment " << w.alignment;
  text << ", " << w.routing << ", " << w.ranks << " ranks, " << memory_name(one)
       << (one.graph ? ", graphs" : "");
  return text.str();
}

std::string summary_name(const Case& one, Operation operation) {
  const Workload& w = one.workload;
  const bool typed = operation != Operation::prepare;
  std::string varies;
  if (one.part == "topk") varies = " K=" + std::to_string(w.topk);
  if (one.part == "experts") varies = " E=" + std::to_string(w.experts);
  if (one.part == "skew") varies = " " + w.routing;
  if (one.part == "gpus") varies = " " + std::to_string(w.ranks) + " ranks";
  return "T=" + std::to_string(w.tokens) + varies + " " + name_of(w.layout) + "-major " +
         name_of(operation) + (typed ? std::string(" ") + name_of(w.element) : "") +
         (one.staged ? ", staged" : "");
}

std::string json_line(const Run& run, const Case& one, const StepResult& step,
                      const CaseResult& result) {
  const Workload& w = one.workload;
  const Bytes bytes(w, result.volume);
  const double mine = p50(step.seconds);
  const int per_gpu = run.place.ranks_per_gpu;
  std::ostringstream out;
  out << "{\"part\": " << quoted(one.part)
      << ", \"operation\": " << quoted(name_of(step.step.operation)) << ", \"sms\": " << step.blocks
      << ", \"sms_allowed\": " << step.step.sms << ", \"ranks\": " << w.ranks
      << ", \"gpus\": " << (w.ranks + per_gpu - 1) / per_gpu << ", \"tokens\": " << w.tokens
      << ", \"hidden\": " << w.hidden << ", \"topk\": " << w.topk << ", \"experts\": " << w.experts
      << ", \"alignment\": " << w.alignment << ", \"layout\": " << quoted(name_of(w.layout))
      << ", \"dtype\": " << quoted(name_of(w.element)) << ", \"routing\": " << quoted(w.routing)
      << ", \"seed\": " << w.seed << ", \"memory\": " << quoted(memory_name(one))
      << ", \"graph\": " << (one.graph ? "true" : "false") << ", \"iterations\": " << w.iters
      << ", \"p50_us\": " << number(mine * 1e6, 3)
      << ", \"p99_us\": " << number(p99(step.seconds) * 1e6, 3);
  const auto optional = [&](const char* key, double value, int decimals) {
    if (value != 0) out << ", \"" << key << "\": " << number(value, decimals);
  };
  if (step.step.operation != Operation::prepare) {
    out << ", \"wire_bytes\": " << number(bytes.wire(), 0);
    optional("wire_gb_per_s", gigabytes_per_second(bytes.wire(), mine), 2);
    optional("rows_gb_per_s", gigabytes_per_second(bytes.all(), mine), 2);
    optional("floor_us", p50(result.floor.seconds) * 1e6, 3);
    out << ", \"floor_by\": " << quoted(result.floor.by);
    optional("copy_engine_us", p50(result.copy_engine.seconds) * 1e6, 3);
    optional("nccl_us", p50(result.nccl) * 1e6, 3);
    optional("percent_of_floor", 100 * p50(result.floor.seconds) / mine, 2);
  }
  optional("target_us", step.step.target_us, 1);
  out << "}";
  return out.str();
}

}  // namespace

void print_head(const Run& run) {
  std::printf("crossdock-bench ep --device cuda: %d %s", run.place.launch.num_ranks,
              run.place.launch.threads ? "threads" : "processes");
  if (run.place.shares_devices()) std::printf(", %d per GPU", run.place.ranks_per_gpu);
  std::printf(", seed %llu, %d iterations after %d\n",
              static_cast<unsigned long long>(run.options.workload.seed),
              run.options.workload.iters, run.options.workload.warmup);
  std::printf("gpus      %s\n", to_string(run.gpus).c_str());
  std::printf("host      %s\n", run.machine.processor.c_str());
  std::printf("build     %s\n", run.machine.build.c_str());
  std::printf("baseline  %s\n", run.baseline.c_str());
  for (const std::string& doubt : run.machine.doubts) std::printf("DOUBT     %s\n", doubt.c_str());
  std::printf(
      "\nA time is that of a whole operation, by events on its stream, from a start in common "
      "(all\n"
      "ranks have enqueued it): the maximum over the ranks, of which p50 and p99 are shown. GB/s\n"
      "per rank: wire counts the rows that leave it, once per destination rank; rows also those\n"
      "that stay (DeepEP's way). floor: every GPU stores the wire bytes into its peers' memory by\n"
      "a plain kernel, the best of several. NCCL takes: an all-to-all of as many bytes, equally\n"
      "split, over ours.\n");
  std::fflush(stdout);
}

void print_case(const Run& run, const Case& one, const CaseResult& result) {
  const Bytes bytes(one.workload, result.volume);
  std::printf("\n%s\n", title(one).c_str());
  std::printf(
      "  %.0f of %.0f rows leave a rank, %.2f MB; group memory %.1f MB symmetric, %.1f MB "
      "private\n",
      bytes.volume.sent_rows, bytes.volume.all_rows, bytes.wire() * 1e-6,
      static_cast<double>(result.group_memory.symmetric_bytes) * 1e-6,
      static_cast<double>(result.group_memory.private_bytes) * 1e-6);
  std::printf("  %-32s %5s %10s %10s %10s %10s %8s %10s\n", "operation", "SMs", "p50 us", "p99 us",
              "wire GB/s", "rows GB/s", "% floor", "NCCL takes");
  for (const StepResult& step : result.steps) {
    print_line({name_of(step.step.operation), sms_text(step), &step.seconds,
                step.step.operation != Operation::prepare},
               bytes, result);
  }
  if (!result.floor.seconds.empty()) {
    print_line({"floor: " + result.floor.by, "-", &result.floor.seconds}, bytes, result);
    print_line({result.copy_engine.by, "-", &result.copy_engine.seconds}, bytes, result);
  }
  if (!result.nccl.empty()) print_line({run.baseline, "-", &result.nccl}, bytes, result);
  std::fflush(stdout);
}

void print_summary(const std::vector<Finished>& cases) {
  std::printf("\n%-44s %9s %9s %5s %9s %9s %8s\n", "operation", "floor us", "ours us", "SMs",
              "target us", "NCCL us", "% floor");
  for (const auto& [one, result] : cases) {
    for (const StepResult& step : result.steps) {
      const bool moves = step.step.operation != Operation::prepare;
      const double floor = moves ? p50(result.floor.seconds) : 0, mine = p50(step.seconds);
      std::printf("%-44s %9s %9s %5s %9s %9s %8s\n", summary_name(one, step.step.operation).c_str(),
                  microseconds(floor).c_str(), microseconds(mine).c_str(), sms_text(step).c_str(),
                  cell(step.step.target_us, 0).c_str(),
                  microseconds(moves ? p50(result.nccl) : 0).c_str(),
                  cell(mine == 0 ? 0 : 100 * floor / mine, 1).c_str());
    }
  }
  const bool aimed = std::any_of(cases.begin(), cases.end(), [](const Finished& finished) {
    const auto& steps = finished.one.steps;
    return std::any_of(steps.begin(), steps.end(),
                       [](const Step& step) { return step.target_us != 0; });
  });
  if (aimed) std::printf("Targets are for 4 H200 GPUs of one NVLink host.\n");
  std::fflush(stdout);
}

JsonLines::JsonLines(const std::string& path, const Run& run) : path_(path), file_(path) {
  std::ostringstream line;
  line << "{\"machine\": " << to_json(run.gpus) << ", \"host\": " << quoted(run.machine.processor)
       << ", \"build\": " << quoted(run.machine.build) << ", \"baseline\": " << quoted(run.baseline)
       << ", \"doubts\": " << quoted(run.machine.doubts)
       << ", \"preset\": " << quoted(run.options.driver.preset)
       << ", \"threads\": " << (run.place.launch.threads ? "true" : "false")
       << ", \"seed\": " << run.options.workload.seed << "}";
  write(line.str());
}

void JsonLines::add(const Run& run, const Case& one, const CaseResult& result) {
  for (const StepResult& step : result.steps) write(json_line(run, one, step, result));
}

void JsonLines::write(const std::string& line) {
  file_ << line << "\n" << std::flush;
  if (!file_) throw std::runtime_error("--json " + path_ + ": cannot be written");
}

}  // namespace bench::gpu
