// Log lines on standard error: warnings always, topics on request (XD_LOG).
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace xd {

// One line, "crossdock: <text>", written by one call so that lines of threads do not mix.
void log_line(std::string_view text) noexcept;

// True if XD_LOG names the topic or "all".
bool log_enabled(std::string_view topic);

template <class... Parts>
void log_warning(const Parts&... parts) {
  log_line(concat("warning: ", parts...));
}

template <class... Parts>
void log_topic(std::string_view topic, const Parts&... parts) {
  if (log_enabled(topic)) log_line(concat("[", topic, "] ", parts...));
}

}  // namespace xd
