#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>
#include <utility>

#include "routing.h"
#include "table.h"

namespace bench {
namespace {

std::string title(const Report& report) {
  const Workload& w = report.workload;
  std::ostringstream text;
  text << "crossdock-bench ep: " << w.ranks << (report.threads ? " threads" : " processes")
       << ", T=" << w.tokens << " H=" << w.hidden << " K=" << w.topk << " E=" << w.experts << ' '
       << name_of(w.element) << ", " << name_of(w.layout) << "-major, alignment " << w.alignment
       << (w.weighted ? ", weighted" : "") << (w.tables ? ", tables" : "") << ", routing "
       << w.routing << ", seed " << w.seed << ", " << w.iters << " iterations";
  return text.str();
}

Json json_of(const Report& report, const TableRow& row) {
  Json json{{"operation", row.operation}, {"by", row.by}};
  set_number(json, "p50_us", row.p50 * 1e6, 3);
  set_number(json, "p99_us", row.p99 * 1e6, 3);
  if (row.moves_rows) {
    const auto row_bytes = static_cast<double>(report.workload.row_bytes());
    const Volume& volume = report.volume;
    set_number(json, "wire_gb_per_s", volume.sent_rows * row_bytes / row.p50 * 1e-9, 3);
    set_number(json, "rows_gb_per_s", volume.all_rows * row_bytes / row.p50 * 1e-9, 3);
  }
  set_number(json, "floor_ratio", row.floor_ratio, 3);
  set_number(json, "mpi_ratio", row.mpi_ratio, 3);
  return json;
}

std::vector<Json> rows_of(const Report& report) {
  std::vector<Json> rows;
  for (const TableRow& row : report.rows) rows.push_back(json_of(report, row));
  return rows;
}

}  // namespace

Volume volume_of(const std::vector<std::vector<std::int64_t>>& rows) {
  const auto ranks = static_cast<double>(rows.size());
  Volume volume;
  for (std::size_t source = 0; source < rows.size(); ++source) {
    const auto all = static_cast<double>(
        std::accumulate(rows[source].begin(), rows[source].end(), std::int64_t{0}));
    volume.all_rows += all / ranks;
    volume.sent_rows += (all - static_cast<double>(rows[source][source])) / ranks;
  }
  return volume;
}

Volume volume_of(const Workload& w) { return volume_of(count_rows(w, make_routing(w))); }

Json json_of(const Workload& w) {
  return {{"ranks", w.ranks},
          {"tokens", w.tokens},
          {"hidden", w.hidden},
          {"topk", w.topk},
          {"experts", w.experts},
          {"alignment", w.alignment},
          {"weighted", w.weighted},
          {"tables", w.tables},
          {"layout", name_of(w.layout)},
          {"dtype", name_of(w.element)},
          {"routing", w.routing},
          {"seed", w.seed},
          {"iterations", w.iters}};
}

double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(fraction * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
}

void print_head(const std::string& title, const Machine& machine) {
  print_text("", title);
  print_text("machine  ", machine.processor);
  print_text("build    ", machine.build);
  for (const std::string& doubt : machine.doubts) print_text("DOUBT    ", doubt);
}

Json head(const std::string& title, const Machine& machine) {
  return {{"title", title},
          {"machine", machine.processor},
          {"build", machine.build},
          {"date", machine.date},
          {"doubts", machine.doubts}};
}

void write_file(const Json& json, const std::string& path) {
  std::ofstream file(path);
  const char* before = "{\n";
  for (const auto& [key, value] : json.items()) {
    file << std::exchange(before, ",\n") << Json(key) << ':';
    if (!value.is_array() || value.empty() || !value.front().is_object()) {
      file << value;
      continue;
    }
    const char* before_row = "[\n";
    for (const Json& row : value) file << std::exchange(before_row, ",\n") << row;
    file << "\n]";
  }
  file << "\n}\n";
  file.close();
  if (!file) throw std::runtime_error("--json " + path + ": cannot be written");
}

void print(const Report& report) {
  const double row_bytes = static_cast<double>(report.workload.row_bytes());
  print_head(title(report), report.machine);
  std::printf("volume   a rank sends %.0f rows, %.2f MB, to others (with its own: %.0f rows)\n\n",
              report.volume.sent_rows, report.volume.sent_rows * row_bytes * 1e-6,
              report.volume.all_rows);
  print_table("",
              {{"operation", "operation", kText},
               {"by", "by", kText},
               {"p50_us", "p50 us", 1},
               {"p99_us", "p99 us", 1},
               {"wire_gb_per_s", "wire GB/s", 2},
               {"rows_gb_per_s", "rows GB/s", 2},
               {"floor_ratio", "x copy", 2},
               {"mpi_ratio", "MPI takes", 2}},
              rows_of(report));
  std::printf("\n");
  print_text(
      "",
      "Times run from a common start to the end of the slowest rank. GB/s per rank: wire counts "
      "the rows that leave it, once per destination rank; rows also those that stay. x copy: p50 "
      "over that of the floor, all ranks copying their wire bytes into a neighbour's memory at "
      "once. MPI takes: its p50 over this one.");
  for (const std::string& note : report.notes) print_text("", note);
  std::printf("\n");
}

void write_json(const Report& report, const std::string& path) {
  const Workload& w = report.workload;
  Json json = head(title(report), report.machine);
  json["threads"] = report.threads;
  json.update(json_of(w));
  json.update({{"sent_rows", report.volume.sent_rows},
               {"all_rows", report.volume.all_rows},
               {"row_bytes", w.row_bytes()},
               {"rows", rows_of(report)},
               {"notes", report.notes}});
  write_file(json, path);
}

}  // namespace bench
