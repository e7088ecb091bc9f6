#include "table.h"

#include <cmath>
#include <cstdio>
#include <string>

namespace bench {
namespace {

std::string cell(const Json& row, const Column& column) {
  const auto field = row.find(column.key);
  if (field == row.end()) return "-";
  if (field->is_string()) return field->get<std::string>();
  char text[64];
  std::snprintf(text, sizeof(text), "%.*f", column.decimals, field->get<double>());
  return text;
}

void print_cell(bool first, const Column& column, const std::string& text) {
  std::printf("%s%*s", first ? "" : " ", column.width, text.c_str());
}

}  // namespace

void print_table(const char* indent, const std::vector<Column>& columns,
                 const std::vector<Json>& rows) {
  std::printf("%s", indent);
  for (const Column& column : columns) {
    print_cell(&column == &columns.front(), column, column.heading);
  }
  for (const Json& row : rows) {
    std::printf("\n%s", indent);
    for (const Column& column : columns) {
      print_cell(&column == &columns.front(), column, cell(row, column));
    }
  }
  std::printf("\n");
}

void set_number(Json& row, const char* key, double value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  if (value != 0) row[key] = std::round(value * scale) / scale;
}

}  // namespace bench
