// Errors inside the library: an Error is thrown where something fails and turned into a status code
// and the thread's error text in one place, guarded(), at the C boundary.
#pragma once

#include <crossdock/status.h>

#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

namespace xd {

// The name that xd_status_name returns.
const char* status_name(std::int32_t status);

class Error : public std::exception {
 public:
  Error(xd_status status, std::string text, int peer = -1, int error_number = 0)
      : status_(status), text_(std::move(text)), peer_(peer), error_number_(error_number) {}
  xd_status status() const { return status_; }
  // The lowest rank that the error is about; -1 = none, or the text alone says it.
  int peer() const { return peer_; }
  int error_number() const { return error_number_; }  // errno of a system call that failed, or 0
  const std::string& text() const { return text_; }
  const char* what() const noexcept override { return text_.c_str(); }

 private:
  xd_status status_;
  std::string text_;
  int peer_;
  int error_number_;
};

template <class... Parts>
std::string concat(const Parts&... parts) {
  std::ostringstream out;
  (out << ... << parts);
  if (!out) throw std::bad_alloc();  // streams swallow this exception
  return out.str();
}

// The text of an error. Where there is no memory for it, the error is thrown with a short text.
template <class... Parts>
std::string error_text(const Parts&... parts) {
  try {
    return concat(parts...);
  } catch (const std::bad_alloc&) {
    return "(no memory)";  // short enough to fit into the string itself
  }
}

template <class... Parts>
[[noreturn]] void fail(xd_status status, const Parts&... parts) {
  throw Error(status, error_text(parts...));
}

// An operating system call failed: throws XD_ERROR_SYSTEM with the call's name and errno's text.
[[noreturn]] void fail_errno(const std::string& call, int error_number);

// Checks that stay in release builds. The text names the argument, what was expected and what came.
#define XD_REQUIRE(condition, ...)                                        \
  do {                                                                    \
    if (!(condition)) ::xd::fail(XD_ERROR_INVALID_ARGUMENT, __VA_ARGS__); \
  } while (0)

// Checks a promise of the library to itself. A failed check is a bug here, not a mistake of the
// caller.
#define XD_CHECK(condition)                                                                     \
  do {                                                                                          \
    if (!(condition))                                                                           \
      ::xd::fail(XD_ERROR_INTERNAL, "internal check failed: " #condition " at ", __FILE__, ":", \
                 __LINE__);                                                                     \
  } while (0)

// Stores "<function>: <text><where>" as the calling thread's last error; never throws.
void set_last_error(const char* function, const char* text, const char* where = "") noexcept;
const char* last_error() noexcept;

// The exception in flight, without allocating: call these inside a catch block only.
struct Caught {
  xd_status status;
  int error_number;  // errno of a system call that failed, or 0
};
// Copies as much of the exception's text into `text` as there is room for, and a zero.
Caught caught(std::span<char> text) noexcept;
// Returns the exception's status. Its text becomes the calling thread's last error, with `where`
// behind it.
xd_status current_exception_status(const char* function, const char* where = "") noexcept;

// Runs body() behind the C boundary: no exception passes it.
template <class Body>
xd_status guarded(const char* function, Body&& body) noexcept {
  try {
    std::forward<Body>(body)();
    return XD_SUCCESS;
  } catch (...) {
    return current_exception_status(function);
  }
}

}  // namespace xd
