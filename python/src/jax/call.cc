#include "call.h"

#include <sstream>

namespace xdjax {
namespace {

ffi::ErrorCode error_code(xd_status status) {
  switch (status) {
    case XD_SUCCESS:
      return ffi::ErrorCode::kOk;
    case XD_ERROR_INVALID_ARGUMENT:
      return ffi::ErrorCode::kInvalidArgument;
    case XD_ERROR_MISMATCH:
    case XD_ERROR_BUSY:
      return ffi::ErrorCode::kFailedPrecondition;
    case XD_ERROR_OVERFLOW:
      return ffi::ErrorCode::kOutOfRange;
    case XD_ERROR_TIMEOUT:
      return ffi::ErrorCode::kDeadlineExceeded;
    case XD_ERROR_PEER_LOST:
      return ffi::ErrorCode::kUnavailable;
    case XD_ERROR_ABORTED:
      return ffi::ErrorCode::kAborted;
    case XD_ERROR_OUT_OF_MEMORY:
      return ffi::ErrorCode::kResourceExhausted;
    case XD_ERROR_UNSUPPORTED:
      return ffi::ErrorCode::kUnimplemented;
    case XD_ERROR_SYSTEM:
    case XD_ERROR_INTERNAL:
      break;
  }
  return ffi::ErrorCode::kInternal;
}

}  // namespace

ffi::Error error_of(const Problem& problem) {
  return ffi::Error(error_code(problem.status),
                    std::string(xd_status_name(problem.status)) + ": " + problem.text);
}

std::vector<std::string> words(std::string_view text) {
  std::istringstream stream{std::string(text)};
  std::vector<std::string> found;
  for (std::string word; stream >> word;) found.push_back(word);
  return found;
}

std::optional<Problem> add_all(Operands& operands, const std::vector<std::string>& arguments,
                               const std::vector<std::string>& results, ffi::RemainingArgs args,
                               ffi::RemainingRets rets) {
  if (arguments.size() != args.size() || results.size() != rets.size()) {
    return invalid("expected " + std::to_string(arguments.size()) + " arguments and " +
                   std::to_string(results.size()) + " results, got " + std::to_string(args.size()) +
                   " and " + std::to_string(rets.size()));
  }
  for (std::size_t i = 0; i < arguments.size(); ++i) {
    if (auto problem = operands.add(arguments[i], *args.get<ffi::AnyBuffer>(i))) return problem;
  }
  for (std::size_t i = 0; i < results.size(); ++i) {
    if (auto problem = operands.add(results[i], **rets.get<ffi::AnyBuffer>(i))) return problem;
  }
  return std::nullopt;
}

}  // namespace xdjax
