// The table and the JSON file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "machine.h"
#include "table.h"
#include "workload.h"

namespace bench {

// Rows that cross between ranks, as means over the ranks.
struct Volume {
  double sent_rows = 0;  // unique (token, rank) pairs, without those that stay on their rank
  double all_rows = 0;   // including rows that stay, as DeepEP counts
};
Volume volume_of(const std::vector<std::vector<std::int64_t>>& rows);  // [source][destination]
Volume volume_of(const Workload& workload);

struct TableRow {
  std::string operation;
  std::string by;           // "zero-copy", "staged", "MPI", "copy"
  double p50 = 0, p99 = 0;  // seconds
  bool moves_rows = false;
  double floor_ratio = 0;  // p50 divided by the plain copy's; 0: none
  double mpi_ratio = 0;    // MPI's p50 divided by this one; 0: none
};

// The facts by which a reader judges a benchmark's tables, above them and in files of results.
void print_head(const std::string& title, const Machine& machine);
Json head(const std::string& title, const Machine& machine);

// Writes an object with a line for each field, and in a list of rows for each row. Throws
// std::runtime_error naming --json.
void write_file(const Json& json, const std::string& path);

// The workload's fields in files of results.
Json json_of(const Workload& workload);

double percentile(std::vector<double> values, double fraction);

struct Report {
  Machine machine;
  Workload workload;
  Volume volume;
  bool threads = false;
  std::vector<TableRow> rows{};
  std::vector<std::string> notes{};  // below the table
};

void print(const Report& report);
void write_json(const Report& report, const std::string& path);

}  // namespace bench
