// An operation error: a non-fatal error of one operation, on its way to the caller and into the
// status.
#pragma once

#include <crossdock/status.h>

#include <array>
#include <new>
#include <string>

#include "base/error.h"
#include "turn/family.h"

namespace xd::turn {

template <class Family>
struct OperationError {
  xd_status status = XD_SUCCESS;
  std::string text;
  int rank = -1;  // the lowest rank that it is about
  typename Family::Facts facts{};
  bool met_by_all = false;  // every rank meets an error of its own in this operation

  explicit operator bool() const { return status != XD_SUCCESS; }
};

// The exception in flight, as an operation error of `rank`'s own call. Call it inside a catch
// block.
template <class Family>
OperationError<Family> current_operation_error(int rank) noexcept {
  std::array<char, 1024> text;
  OperationError<Family> operation_error;
  operation_error.status = caught(text).status;
  operation_error.rank = rank;
  try {
    operation_error.text = text.data();
  } catch (const std::bad_alloc&) {
    operation_error.text = "(no memory)";  // short enough to fit into the string itself
  }
  return operation_error;
}

}  // namespace xd::turn
