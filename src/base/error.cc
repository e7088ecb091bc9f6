#include "base/error.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <iterator>
#include <new>

namespace xd {
namespace {

// The buffer is fixed, because storing an error must not itself be able to fail.
thread_local std::array<char, 1024> g_last_error{};

}  // namespace

const char* status_name(std::int32_t status) {
  static constexpr const char* kNames[] = {
      "XD_SUCCESS",
      "XD_ERROR_INVALID_ARGUMENT",
      "XD_ERROR_MISMATCH",
      "XD_ERROR_OVERFLOW",
      "XD_ERROR_TIMEOUT",
      "XD_ERROR_PEER_LOST",
      "XD_ERROR_ABORTED",
      "XD_ERROR_BUSY",
      "XD_ERROR_OUT_OF_MEMORY",
      "XD_ERROR_UNSUPPORTED",
      "XD_ERROR_SYSTEM",
      "XD_ERROR_INTERNAL",
  };
  static_assert(std::size(kNames) == XD_ERROR_INTERNAL + 1, "a name for every status, by number");
  if (status < 0 || status > XD_ERROR_INTERNAL) return "XD_UNKNOWN_STATUS";
  return kNames[status];
}

void fail_errno(const std::string& call, int error_number) {
  throw Error(XD_ERROR_SYSTEM,
              error_text(call, ": ", std::strerror(error_number), " (errno ", error_number, ")"),
              -1, error_number);
}

void set_last_error(const char* function, const char* text, const char* where) noexcept {
  std::size_t at = 0;
  // `where` is never cut off.
  std::size_t end = g_last_error.size() - 1 - std::min(std::strlen(where), g_last_error.size() / 2);
  const auto append = [&at, &end](const char* part) {
    const std::size_t n = std::min(std::strlen(part), end - at);
    std::memcpy(g_last_error.data() + at, part, n);
    at += n;
  };
  // The text of a fatal error may begin with the operation that met it, "xd_ep_prepare of group 0",
  // which may be this very function.
  const std::size_t length = std::strlen(function);
  if (std::strncmp(text, function, length) != 0 || text[length] != ' ') {
    append(function);
    append(": ");
  }
  append(text);
  end = g_last_error.size() - 1;
  append(where);
  g_last_error[at] = '\0';
}

const char* last_error() noexcept { return g_last_error.data(); }

Caught caught(std::span<char> text) noexcept {
  const auto keep = [text](const char* what) {
    const std::size_t n = std::min(std::strlen(what), text.size() - 1);
    std::memcpy(text.data(), what, n);
    text[n] = '\0';
  };
  try {
    throw;
  } catch (const Error& error) {
    keep(error.what());
    return {error.status(), error.error_number()};
  } catch (const std::bad_alloc&) {
    keep("out of host memory");
    return {XD_ERROR_OUT_OF_MEMORY, 0};
  } catch (const std::exception& error) {
    keep(error.what());
  } catch (...) {
    keep("unknown exception");
  }
  return {XD_ERROR_INTERNAL, 0};
}

xd_status current_exception_status(const char* function, const char* where) noexcept {
  std::array<char, sizeof(g_last_error)> text;
  const Caught error = caught(text);
  set_last_error(function, text.data(), where);
  return error.status;
}

}  // namespace xd
