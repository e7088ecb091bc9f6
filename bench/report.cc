#include "report.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <numeric>
#include <sstream>
#include <stdexcept>

#include "routing.h"

namespace bench {
namespace {

double gigabytes_per_second(double rows, const Report& report, double seconds) {
  return rows * static_cast<double>(report.workload.row_bytes()) / seconds * 1e-9;
}

std::string ratio(double value) { return value == 0 ? "-" : number(value, 2); }

std::string title(const Report& report) {
  const Workload& w = report.workload;
  std::ostringstream text;
  text << "crossdock-bench ep: " << w.ranks << (report.threads ? " threads" : " processes")
       << ", T=" << w.tokens << " H=" << w.hidden << " K=" << w.topk << " E=" << w.experts << ' '
       << name_of(w.element) << ", " << name_of(w.layout) << "-major, alignment " << w.alignment
       << ", routing " << w.routing << ", seed " << w.seed << ", " << w.iters << " iterations";
  return text.str();
}

std::string json_row(const Report& report, const TableRow& row) {
  std::ostringstream out;
  out << "{\"operation\": " << quoted(row.operation) << ", \"by\": " << quoted(row.by)
      << ", \"p50_us\": " << number(row.p50 * 1e6, 3)
      << ", \"p99_us\": " << number(row.p99 * 1e6, 3);
  if (row.moves_rows) {
    out << ", \"wire_gb_per_s\": "
        << number(gigabytes_per_second(report.volume.sent_rows, report, row.p50), 3)
        << ", \"all_rows_gb_per_s\": "
        << number(gigabytes_per_second(report.volume.all_rows, report, row.p50), 3);
  }
  if (row.floor_ratio != 0) out << ", \"floor_ratio\": " << number(row.floor_ratio, 3);
  if (row.mpi_ratio != 0) out << ", \"mpi_ratio\": " << number(row.mpi_ratio, 3);
  out << "}";
  return out.str();
}

}  // namespace

std::string number(double value, int decimals) {
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", decimals, value);
  return text;
}

// A JSON string; control characters do not occur in what is written here but are dropped anyway.
std::string quoted(const std::string& text) {
  std::string result = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') result += '\\';
    if (static_cast<unsigned char>(c) >= 0x20) result += c;
  }
  return result + '"';
}

std::string quoted(const std::vector<std::string>& texts) {
  std::string result = "[";
  for (const std::string& text : texts) result += (result.size() > 1 ? ", " : "") + quoted(text);
  return result + "]";
}

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

double percentile(std::vector<double> values, double fraction) {
  std::sort(values.begin(), values.end());
  const double rank = std::ceil(fraction * static_cast<double>(values.size()));
  return values[static_cast<std::size_t>(std::max(rank, 1.0)) - 1];
}

void print(const Report& report) {
  const double row_bytes = static_cast<double>(report.workload.row_bytes());
  std::printf("%s\n", title(report).c_str());
  std::printf("machine  %s\n", report.machine.processor.c_str());
  std::printf("build    %s\n", report.machine.build.c_str());
  for (const std::string& doubt : report.machine.doubts)
    std::printf("DOUBT    %s\n", doubt.c_str());
  std::printf("volume   a rank sends %.0f rows, %.2f MB, to others (with its own: %.0f rows)\n\n",
              report.volume.sent_rows, report.volume.sent_rows * row_bytes * 1e-6,
              report.volume.all_rows);
  std::printf("%-13s %-10s %11s %11s %10s %10s %9s %9s\n", "operation", "by", "p50 us", "p99 us",
              "wire GB/s", "rows GB/s", "x copy", "MPI takes");
  for (const TableRow& row : report.rows) {
    const auto speed = [&](double rows) {
      return row.moves_rows ? number(gigabytes_per_second(rows, report, row.p50), 2) : "-";
    };
    std::printf("%-13s %-10s %11.1f %11.1f %10s %10s %9s %9s\n", row.operation.c_str(),
                row.by.c_str(), row.p50 * 1e6, row.p99 * 1e6,
                speed(report.volume.sent_rows).c_str(), speed(report.volume.all_rows).c_str(),
                ratio(row.floor_ratio).c_str(), ratio(row.mpi_ratio).c_str());
  }
  std::printf(
      "\nTimes run from a common start to the end of the slowest rank. GB/s per rank: wire counts "
      "the\n"
      "rows that leave it, once per destination rank; rows also those that stay. x copy: p50 over\n"
      "that of the floor, all ranks copying their wire bytes into a neighbour's memory at once.\n"
      "MPI takes: its p50 over this one.\n");
  for (const std::string& note : report.notes) std::printf("%s\n", note.c_str());
  std::printf("\n");
}

void write_json(const Report& report, const std::string& path) {
  const Workload& w = report.workload;
  std::ofstream file(path);
  file << "{\"title\": " << quoted(title(report))
       << ",\n \"machine\": " << quoted(report.machine.processor)
       << ",\n \"build\": " << quoted(report.machine.build)
       << ",\n \"doubts\": " << quoted(report.machine.doubts) << ",\n \"ranks\": " << w.ranks
       << ", \"threads\": " << (report.threads ? "true" : "false") << ", \"tokens\": " << w.tokens
       << ", \"hidden\": " << w.hidden << ", \"topk\": " << w.topk << ", \"experts\": " << w.experts
       << ", \"alignment\": " << w.alignment << ", \"layout\": " << quoted(name_of(w.layout))
       << ", \"dtype\": " << quoted(name_of(w.element)) << ", \"routing\": " << quoted(w.routing)
       << ", \"seed\": " << w.seed << ", \"iterations\": " << w.iters
       << ",\n \"sent_rows\": " << number(report.volume.sent_rows, 2)
       << ", \"all_rows\": " << number(report.volume.all_rows, 2)
       << ", \"row_bytes\": " << w.row_bytes() << ",\n \"rows\": [";
  for (std::size_t i = 0; i < report.rows.size(); ++i) {
    file << (i == 0 ? "\n  " : ",\n  ") << json_row(report, report.rows[i]);
  }
  file << "\n ],\n \"notes\": " << quoted(report.notes) << "}\n";
  file.close();
  if (!file) throw std::runtime_error("--json " + path + ": cannot be written");
}

}  // namespace bench
