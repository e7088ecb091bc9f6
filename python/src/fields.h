// The fields of the C API's structs by their names in the headers, for all that reads or writes
// structs by name.
#pragma once

#include <crossdock/crossdock.h>

#include <tuple>
#include <type_traits>

namespace xdpy {

template <class Struct, class Value>
struct Field {
  const char* name;
  Value Struct::*at;

  static constexpr bool is_tensor() { return std::is_same_v<Value, const DLTensor*>; }
};
template <class Struct, class Value>
Field(const char*, Value Struct::*) -> Field<Struct, Value>;

// Of a struct that begins with its size: its `name`, its `init`, and the `list` of its other fields
// in their order. The build makes the specialisations out of the headers (fields.py).
template <class Struct>
struct Fields;

// Calls visit(field) for each field of `list`.
template <class Struct, class Visit>
void for_each_field(Visit visit) {
  std::apply([&](const auto&... fields) { (visit(fields), ...); }, Fields<Struct>::list);
}

}  // namespace xdpy

#include "fields_of_structs.h"
