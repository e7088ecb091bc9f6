#include "base/env.h"

#include <charconv>
#include <cstdlib>
#include <cstring>

#include "base/error.h"
#include "base/log.h"

namespace xd {
namespace {

std::string read(const char* variable, const char* default_value) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : default_value;
}

int read(const char* variable, int default_value) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return default_value;
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error == std::errc() && stop == end) return value;
  log_warning(variable, "=", text, " is not a whole number; using ", default_value);
  return default_value;
}

}  // namespace

const Env& env() {
  static const Env values{
#define XD_ENV(field, type, variable, default_value, meaning) \
  .field = read(variable, default_value),
#include "base/env.def"
#undef XD_ENV
  };
  return values;
}

int resolve_timeout(int timeout_ms) {
  XD_REQUIRE(timeout_ms >= 0, "config.timeout_ms = ", timeout_ms, ", expected >= 0");
  if (timeout_ms > 0) return timeout_ms;
  XD_REQUIRE(env().timeout_ms > 0, "XD_TIMEOUT_MS = ", env().timeout_ms, ", expected > 0");
  return env().timeout_ms;
}

}  // namespace xd
