#include "base/error.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <new>

namespace xd {
namespace {

// A fixed buffer: storing an error must not itself be able to fail.
thread_local std::array<char, 1024> g_last_error{};

}  // namespace

const char* status_name(std::int32_t status) {
  switch (status) {
    case XD_SUCCESS:
      return "XD_SUCCESS";
    case XD_ERROR_INVALID_ARGUMENT:
      return "XD_ERROR_INVALID_ARGUMENT";
    case XD_ERROR_MISMATCH:
      return "XD_ERROR_MISMATCH";
    case XD_ERROR_OVERFLOW:
      return "XD_ERROR_OVERFLOW";
    case XD_ERROR_TIMEOUT:
      return "XD_ERROR_TIMEOUT";
    case XD_ERROR_PEER_LOST:
      return "XD_ERROR_PEER_LOST";
    case XD_ERROR_ABORTED:
      return "XD_ERROR_ABORTED";
    case XD_ERROR_BUSY:
      return "XD_ERROR_BUSY";
    case XD_ERROR_OUT_OF_MEMORY:
      return "XD_ERROR_OUT_OF_MEMORY";
    case XD_ERROR_UNSUPPORTED:
      return "XD_ERROR_UNSUPPORTED";
    case XD_ERROR_SYSTEM:
      return "XD_ERROR_SYSTEM";
    case XD_ERROR_INTERNAL:
      return "XD_ERROR_INTERNAL";
    default:
      return "XD_UNKNOWN_STATUS";
  }
}

void fail_errno(const std::string& call, int error_number) {
  fail(XD_ERROR_SYSTEM, call, ": ", std::strerror(error_number), " (errno ", error_number, ")");
}

void set_last_error(const char* function, const char* text) noexcept {
  std::size_t at = 0;
  const auto append = [&at](const char* part) {
    const std::size_t n = std::min(std::strlen(part), g_last_error.size() - 1 - at);
    std::memcpy(g_last_error.data() + at, part, n);
    at += n;
  };
  append(function);
  append(": ");
  append(text);
  g_last_error[at] = '\0';
}

const char* last_error() noexcept { return g_last_error.data(); }

xd_status current_exception_status(const char* function) noexcept {
  try {
    throw;
  } catch (const Error& error) {
    set_last_error(function, error.what());
    return error.status();
  } catch (const std::bad_alloc&) {
    set_last_error(function, "out of host memory");
    return XD_ERROR_OUT_OF_MEMORY;
  } catch (const std::exception& error) {
    set_last_error(function, error.what());
    return XD_ERROR_INTERNAL;
  } catch (...) {
    set_last_error(function, "unknown exception");
    return XD_ERROR_INTERNAL;
  }
}

}  // namespace xd
