// Reading a versioned struct that crossed the C boundary.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "base/error.h"

namespace xd {

// The number in an enum that a C caller has set, perhaps to none of its values: a C++ enum must not
// be read as such before it is known to hold one of them.
template <class Enum>
std::int32_t raw_enum(const Enum& value) {
  static_assert(sizeof(Enum) == sizeof(std::int32_t));
  std::int32_t number;
  std::memcpy(&number, &value, sizeof(number));
  return number;
}

// Every version of a struct ends at a multiple of its alignment, as its first field is a size_t. So
// no size that is taken cuts a field of up to 8 bytes.
template <class T>
void check_struct(const char* name, const T* user) {
  static_assert(alignof(T) == sizeof(std::size_t));
  XD_REQUIRE(user != nullptr, name, " = NULL, expected a struct");
  const std::size_t size = user->struct_size;
  XD_REQUIRE(size >= sizeof(std::size_t) && size <= 65536 && size % alignof(T) == 0, name,
             ".struct_size = ", size, ", expected ", sizeof(T), ": start from the struct's _INIT");
}

// A copy of *user as this library knows the struct. An older caller passes fewer bytes, and the
// rest keep the values of `defaults`. A newer caller may pass more bytes, as long as the additional
// ones are zero.
template <class T>
T read_struct(const char* name, const T* user, T defaults) {
  check_struct(name, user);
  const std::size_t size = user->struct_size;
  const auto* bytes = reinterpret_cast<const unsigned char*>(user);
  for (std::size_t i = sizeof(T); i < size; ++i) {
    XD_REQUIRE(bytes[i] == 0, name, ".struct_size = ", size,
               " sets fields that this library does not have (it knows ", sizeof(T), " bytes)");
  }
  std::memcpy(&defaults, user, std::min(size, sizeof(T)));
  return defaults;
}

// Fills the caller's output struct, no further than the caller's version of it goes.
template <class T>
void write_struct(const char* name, T* user, T value) {
  check_struct(name, user);
  const std::size_t size = user->struct_size;
  value.struct_size = size;
  std::memcpy(user, &value, std::min(size, sizeof(T)));
}

}  // namespace xd
