// Log lines on standard error: warnings always, topics on request (XD_LOG).
#pragma once

#include <string>
#include <string_view>

#include "base/error.h"

namespace xd {

// Writes one line, "crossdock: <text>", by one system call, so that lines of threads do not mix.
// Allocates nothing.
void log_line(std::string_view text) noexcept;

// True if XD_LOG names the topic or "all".
bool log_enabled(std::string_view topic);

// Logs the parts as one line. Where there is no memory for the line, it says only that.
template <class... Parts>
void log_warning(const Parts&... parts) noexcept {
  try {
    log_line(concat("warning: ", parts...));
  } catch (...) {
    log_line("warning: (no memory for its text)");
  }
}

template <class... Parts>
void log_topic(std::string_view topic, const Parts&... parts) noexcept {
  try {
    if (log_enabled(topic)) log_line(concat("[", topic, "] ", parts...));
  } catch (...) {
    log_line("(no memory for a line)");
  }
}

}  // namespace xd
