#include "base/log.h"

#include <unistd.h>

#include "base/env.h"

namespace xd {

void log_line(std::string_view text) noexcept {
  try {
    const std::string line = concat("crossdock: ", text, "\n");
    // A log that cannot be written has nowhere to be reported.
    [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
  } catch (...) {
  }
}

bool log_enabled(std::string_view topic) {
  std::string_view list = env().log;
  while (!list.empty()) {
    const auto comma = list.find(',');
    const auto word = list.substr(0, comma);
    if (word == topic || word == "all") return true;
    list = comma == std::string_view::npos ? std::string_view{} : list.substr(comma + 1);
  }
  return false;
}

}  // namespace xd
