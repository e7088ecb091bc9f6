// Rows of measurements as JSON objects, for files, and the printers of tables made of them and of
// what is said about them, for terminals of 80 columns.
#pragma once

#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace bench {

// Fields keep the order in which they are set.
using Json = nlohmann::ordered_json;

struct Column {
  const char* key;  // the field's name in rows
  const char* heading;
  int decimals = 0;  // digits after the point
};
inline constexpr int kText = -1;  // in the place of decimals: aligned left

// Prints headings and rows, columns as wide as what stands in them. Where a row lacks a field there
// is "-".
void print_table(const char* indent, const std::vector<Column>& columns,
                 const std::vector<Json>& rows);

// Prints a text in lines of at most 80 columns, where words allow it. The first line begins with
// `label`, and the others under the text behind it.
void print_text(std::string_view label, const std::string& text);

// Sets a number with that many decimals. 0 says that there is none: it is left out.
void set_number(Json& row, const char* key, double value, int decimals);

}  // namespace bench
