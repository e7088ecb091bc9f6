#include "table.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <sstream>

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

void print_cell(bool first, const Column& column, int width, const std::string& text) {
  const bool is_text = column.decimals == kText;
  std::printf("%s%*s", first ? "" : is_text ? "  " : " ", is_text ? -width : width, text.c_str());
}

}  // namespace

void print_table(const char* indent, const std::vector<Column>& columns,
                 const std::vector<Json>& rows) {
  std::vector<int> widths;
  for (const Column& column : columns) {
    std::size_t width = std::string_view(column.heading).size();
    for (const Json& row : rows) width = std::max(width, cell(row, column).size());
    widths.push_back(static_cast<int>(width));
  }
  std::printf("%s", indent);
  for (std::size_t i = 0; i < columns.size(); ++i)
    print_cell(i == 0, columns[i], widths[i], columns[i].heading);
  for (const Json& row : rows) {
    std::printf("\n%s", indent);
    for (std::size_t i = 0; i < columns.size(); ++i)
      print_cell(i == 0, columns[i], widths[i], cell(row, columns[i]));
  }
  std::printf("\n");
}

void print_text(std::string_view label, const std::string& text) {
  constexpr std::size_t kColumns = 80;
  std::istringstream words(text);
  std::string line(label);
  bool begun = false;  // the line has a word
  for (std::string word; words >> word;) {
    if (begun && line.size() + 1 + word.size() > kColumns) {
      std::printf("%s\n", line.c_str());
      line.assign(label.size(), ' ');
      begun = false;
    }
    line += (begun ? " " : "") + word;
    begun = true;
  }
  std::printf("%s\n", line.c_str());
}

void set_number(Json& row, const char* key, double value, int decimals) {
  const double scale = std::pow(10.0, decimals);
  if (value != 0) row[key] = std::round(value * scale) / scale;
}

}  // namespace bench
