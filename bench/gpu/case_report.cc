#include "case_report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>
#include <stdexcept>

#include "../report.h"
#include "../table.h"

namespace bench::gpu {
namespace {

double p50(const std::vector<double>& seconds) {
  return seconds.empty() ? 0 : percentile(seconds, 0.50);
}
double p99(const std::vector<double>& seconds) {
  return seconds.empty() ? 0 : percentile(seconds, 0.99);
}

// The multiprocessors that a step took; if unknown, those that it was allowed.
std::string sms_text(const StepResult& step) {
  const int sms = step.blocks != 0 ? step.blocks : step.step.sms;
  return sms == 0 ? "auto" : std::to_string(sms);
}

bool moves_rows(const StepResult& step) { return step.step.operation != Operation::prepare; }

const char* memory_name(const Case& one) { return one.staged ? "staged" : "zero-copy"; }

// Bytes of a batch, as means over the ranks.
struct Bytes {
  Bytes(const Workload& w, const Volume& of_batch)
      : volume(of_batch), row(static_cast<double>(w.wire_row_bytes())) {}
  double wire() const { return volume.sent_rows * row; }
  double all() const { return volume.all_rows * row; }
  Volume volume;
  double row;
};

// Adds what has been measured, and how it compares with the floor, to a row of a table or a file.
void add_times(Json& row, const std::vector<double>& seconds, int decimals) {
  set_number(row, "p50_us", p50(seconds) * 1e6, decimals);
  set_number(row, "p99_us", p99(seconds) * 1e6, decimals);
}

void add_rates(Json& row, const Bytes& bytes, const std::vector<double>& seconds,
               const CaseResult& result) {
  const double mine = p50(seconds);
  if (mine == 0) return;
  set_number(row, "wire_gb_per_s", bytes.wire() / mine * 1e-9, 2);
  set_number(row, "rows_gb_per_s", bytes.all() / mine * 1e-9, 2);
  set_number(row, "percent_of_floor", 100 * p50(result.floor.seconds) / mine, 2);
}

// A line of a case's table.
Json line(const std::string& operation, const std::string& sms, const std::vector<double>& seconds,
          const Bytes& bytes, const CaseResult& result, bool moves_rows = true) {
  Json row{{"operation", operation}, {"sms", sms}};
  add_times(row, seconds, 3);
  if (moves_rows) {
    add_rates(row, bytes, seconds, result);
    const double mine = p50(seconds);
    set_number(row, "nccl_takes", mine == 0 ? 0 : p50(result.nccl) / mine, 3);
  }
  return row;
}

std::string title(const Case& one) {
  const Workload& w = one.workload;
  std::ostringstream text;
  text << "T=" << w.tokens << " H=" << w.hidden << " K=" << w.topk << " E=" << w.experts << ' '
       << name_of(w.element) << ", " << name_of(w.layout) << "-major";
  if (w.alignment != 1) text << ", alignment " << w.alignment;
  if (w.weighted) text << ", weighted";
  if (w.tables) text << ", tables";
  if (w.combine_wire != XD_EP_WIRE_SAME) text << ", combine's wire " << name_of(w.combine_wire);
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
  if (one.part == "wires") varies = std::string(" ") + name_of(w.combine_wire);
  return "T=" + std::to_string(w.tokens) + varies + " " + name_of(w.layout) + " " +
         name_of(operation) + (typed ? std::string(" ") + name_of(w.element) : "") +
         (w.weighted ? ", weighted" : "") + (w.tables ? ", tables" : "") +
         (one.staged ? ", staged" : "");
}

Json json_line(const Run& run, const Case& one, const StepResult& step, const CaseResult& result) {
  const Workload& w = one.workload;
  const Bytes bytes(w, result.volume);
  const int per_gpu = run.place.ranks_per_gpu;
  Json row{{"part", one.part},
           {"operation", name_of(step.step.operation)},
           {"sms", step.blocks},
           {"sms_allowed", step.step.sms},
           {"gpus", (w.ranks + per_gpu - 1) / per_gpu},
           {"memory", memory_name(one)},
           {"combine_wire", name_of(w.combine_wire)},
           {"graph", one.graph}};
  row.update(json_of(w));
  add_times(row, step.seconds, 3);
  if (moves_rows(step)) {
    row["wire_bytes"] = std::llround(bytes.wire());
    add_rates(row, bytes, step.seconds, result);
    set_number(row, "floor_us", p50(result.floor.seconds) * 1e6, 3);
    row["floor_by"] = result.floor.by;
    set_number(row, "copy_engine_us", p50(result.copy_engine.seconds) * 1e6, 3);
    set_number(row, "nccl_us", p50(result.nccl) * 1e6, 3);
  }
  set_number(row, "target_us", step.step.target_us, 1);
  set_number(row, "beside_product_us", p50(step.overlap.operation_beside) * 1e6, 3);
  set_number(row, "product_beside_us", p50(step.overlap.product_beside) * 1e6, 3);
  set_number(row, "product_us", p50(step.overlap.product) * 1e6, 3);
  return row;
}

// Lines of a case's table: an operation, and what it and a product do to one another.
void add_lines(std::vector<Json>& rows, const StepResult& step, const Bytes& bytes,
               const CaseResult& result) {
  const std::string name = name_of(step.step.operation), sms = sms_text(step);
  rows.push_back(line(name, sms, step.seconds, bytes, result, moves_rows(step)));
  const OverlapTimes& times = step.overlap;
  if (times.product.empty()) return;
  rows.push_back(line("  beside a product", sms, times.operation_beside, bytes, result, false));
  rows.push_back(line("  that product", "-", times.product_beside, bytes, result, false));
  rows.push_back(line("  that product, alone", "-", times.product, bytes, result, false));
}

}  // namespace

void print_head(const Run& run) {
  std::ostringstream first;
  first << "crossdock-bench ep --device cuda: " << run.place.launch.num_ranks
        << (run.place.launch.threads ? " threads" : " processes");
  if (run.place.shares_devices()) first << ", " << run.place.ranks_per_gpu << " per GPU";
  first << ", seed " << run.options.workload.seed << ", " << run.options.workload.iters
        << " iterations after " << run.options.workload.warmup;
  print_text("", first.str());
  print_text("gpus      ", to_string(run.gpus));
  print_text("host      ", run.machine.processor);
  print_text("build     ", run.machine.build);
  print_text("baseline  ", run.baseline);
  for (const std::string& doubt : run.machine.doubts) print_text("DOUBT     ", doubt);
  std::printf("\n");
  print_text(
      "",
      "A time is that of a whole operation, by events on its stream, from a start in common "
      "(all ranks have enqueued it): the maximum over the ranks, of which p50 and p99 are "
      "shown. wire: GB/s of the rows that leave a rank, once per destination rank; rows: also of "
      "those that stay (DeepEP's way). floor: every GPU stores the wire bytes into "
      "its peers' memory by a plain kernel, the best of several. NCCL: an all-to-all of as many "
      "bytes, equally split, over ours.");
  std::fflush(stdout);
}

void print_case(const Run& run, const Case& one, const CaseResult& result) {
  const Bytes bytes(one.workload, result.volume);
  std::printf("\n");
  print_text("", title(one));
  char volume[160];
  std::snprintf(volume, sizeof(volume),
                "%.0f of %.0f rows leave a rank, %.2f MB; group memory %.1f MB symmetric, %.1f MB "
                "private",
                bytes.volume.sent_rows, bytes.volume.all_rows, bytes.wire() * 1e-6,
                static_cast<double>(result.group_memory.symmetric_bytes) * 1e-6,
                static_cast<double>(result.group_memory.private_bytes) * 1e-6);
  print_text("  ", volume);
  std::vector<Json> rows;
  for (const StepResult& step : result.steps) add_lines(rows, step, bytes, result);
  if (!result.floor.seconds.empty()) {
    rows.push_back(line("floor: " + result.floor.by, "-", result.floor.seconds, bytes, result));
    rows.push_back(line(result.copy_engine.by, "-", result.copy_engine.seconds, bytes, result));
  }
  if (!result.nccl.empty()) {
    rows.push_back(line(run.baseline, "-", result.nccl, bytes, result));
  }
  print_table("  ",
              {{"operation", "operation", kText},
               {"sms", "SMs"},
               {"p50_us", "p50 us", 1},
               {"p99_us", "p99 us", 1},
               {"wire_gb_per_s", "wire GB/s", 1},
               {"rows_gb_per_s", "rows GB/s", 1},
               {"percent_of_floor", "% floor", 1},
               {"nccl_takes", "NCCL takes", 2}},
              rows);
  std::fflush(stdout);
}

void print_summary(const std::vector<Finished>& cases) {
  std::vector<Json> rows;
  for (const auto& [one, result] : cases) {
    for (const StepResult& step : result.steps) {
      Json row{{"operation", summary_name(one, step.step.operation)}, {"sms", sms_text(step)}};
      add_times(row, step.seconds, 3);
      set_number(row, "target_us", step.step.target_us, 0);
      if (moves_rows(step)) {
        add_rates(row, Bytes(one.workload, result.volume), step.seconds, result);
        set_number(row, "floor_us", p50(result.floor.seconds) * 1e6, 3);
        set_number(row, "nccl_us", p50(result.nccl) * 1e6, 3);
      }
      rows.push_back(std::move(row));
    }
  }
  std::printf("\n");
  print_table("",
              {{"operation", "operation", kText},
               {"floor_us", "floor", 1},
               {"p50_us", "ours", 1},
               {"sms", "SMs"},
               {"target_us", "target"},
               {"nccl_us", "NCCL", 1},
               {"percent_of_floor", "% floor", 1}},
              rows);
  const bool aimed = std::any_of(cases.begin(), cases.end(), [](const Finished& finished) {
    const auto& steps = finished.one.steps;
    return std::any_of(steps.begin(), steps.end(),
                       [](const Step& step) { return step.target_us != 0; });
  });
  std::printf("Microseconds.%s\n", aimed ? " Targets are for 4 H200 GPUs of one NVLink host." : "");
  std::fflush(stdout);
}

JsonLines::JsonLines(const std::string& path, const Run& run) : path_(path), file_(path) {
  write({{"machine", to_json(run.gpus)},
         {"host", run.machine.processor},
         {"build", run.machine.build},
         {"date", run.machine.date},
         {"baseline", run.baseline},
         {"doubts", run.machine.doubts},
         {"preset", run.options.driver.preset},
         {"threads", run.place.launch.threads},
         {"seed", run.options.workload.seed}});
}

void JsonLines::add(const Run& run, const Case& one, const CaseResult& result) {
  for (const StepResult& step : result.steps) write(json_line(run, one, step, result));
}

void JsonLines::write(const Json& line) {
  file_ << line.dump() << "\n" << std::flush;
  if (!file_) throw std::runtime_error("--json " + path_ + ": cannot be written");
}

}  // namespace bench::gpu
