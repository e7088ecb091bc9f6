// A failed call into the library: its status and text.
#pragma once

#include <crossdock/crossdock.h>

#include <optional>
#include <string>
#include <utility>

namespace xdjax {

struct Problem {
  xd_status status = XD_ERROR_INTERNAL;
  std::string text;
};

// The problem of this thread's last call; nothing if it returned XD_SUCCESS.
inline std::optional<Problem> problem_of(xd_status status) {
  if (status == XD_SUCCESS) return std::nullopt;
  return Problem{status, xd_last_error()};
}

inline Problem invalid(std::string text) { return {XD_ERROR_INVALID_ARGUMENT, std::move(text)}; }

}  // namespace xdjax
