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
