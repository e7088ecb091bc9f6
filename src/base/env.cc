#include "base/env.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <string_view>

#include "base/error.h"
#include "base/log.h"

namespace xd {
namespace {

std::string read(const char* variable, const char* default_value) {
  const char* text = std::getenv(variable);
  return text != nullptr ? text : default_value;
}

int read(const char* variable, int default_value, int least) {
  const char* text = std::getenv(variable);
  if (text == nullptr || *text == '\0') return default_value;
  int value = 0;
  const char* end = text + std::strlen(text);
  const auto [stop, error] = std::from_chars(text, end, value);
  if (error == std::errc() && stop == end && value >= least) return value;
  log_warning(variable, "=", text, " is ignored: expected a whole number from ", least, " to ",
              std::numeric_limits<int>::max(), "; using ", default_value);
  return default_value;
}

// Keeps the topics of a comma list that exist.
std::string known_topics(const std::string& list) {
  constexpr std::array<std::string_view, 4> kTopics{"comm", "plan", "stats", "all"};
  std::string known;
  for (std::size_t at = 0; at < list.size();) {
    const std::size_t comma = std::min(list.find(',', at), list.size());
    const std::string topic = list.substr(at, comma - at);
    at = comma + 1;
    if (std::find(kTopics.begin(), kTopics.end(), topic) != kTopics.end())
      known += (known.empty() ? "" : ",") + topic;
    else if (!topic.empty())
      log_warning("XD_LOG=", topic, " is ignored: expected comm, plan, stats or all");
  }
  return known;
}

struct Defaults {
#define XD_ENV_TEXT(field, variable, default_value, meaning)
#define XD_ENV_NUMBER(field, variable, default_value, least, meaning) \
  static constexpr int field = default_value;
#include "base/env.def"
#undef XD_ENV_TEXT
#undef XD_ENV_NUMBER
};

int known_silence(int silence_ms) {
  if (silence_ms == -1 || silence_ms >= kLeastSilenceMs) return silence_ms;
  log_warning("XD_SILENCE_MS=", silence_ms, " is ignored: expected -1 or at least ",
              kLeastSilenceMs, "; using ", Defaults::silence_ms);
  return Defaults::silence_ms;
}

}  // namespace

const Env& env() {
  static const Env values = read_env();
  return values;
}

Env read_env() {
  Env values{
#define XD_ENV_TEXT(field, variable, default_value, meaning) .field = read(variable, default_value),
#define XD_ENV_NUMBER(field, variable, default_value, least, meaning) \
  .field = read(variable, default_value, least),
#include "base/env.def"
#undef XD_ENV_TEXT
#undef XD_ENV_NUMBER
  };
  values.log = known_topics(values.log);
  values.silence_ms = known_silence(values.silence_ms);
  return values;
}

int resolve_timeout(int timeout_ms) {
  XD_REQUIRE(timeout_ms >= 0, "config.timeout_ms = ", timeout_ms, ", expected >= 0");
  return timeout_ms > 0 ? timeout_ms : env().timeout_ms;
}

}  // namespace xd
