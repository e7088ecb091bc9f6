// Rows of measurements as JSON objects, for files, and the printer of all tables made of them.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

namespace bench {

// Fields keep the order in which they are set.
using Json = nlohmann::ordered_json;

struct Column {
  const char* key;  // the field's name in rows
  const char* heading;
  int width;         // negative: a text, aligned left
  int decimals = 0;  // digits after the point
};

// Prints headings and rows. Where a row lacks a field there is "-".
void print_table(const char* indent, const std::vector<Column>& columns,
                 const std::vector<Json>& rows);

// Sets a number with that many decimals. 0 says that there is none: it is left out.
void set_number(Json& row, const char* key, double value, int decimals);

}  // namespace bench
