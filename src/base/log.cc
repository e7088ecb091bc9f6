#include "base/log.h"

#include <sys/uio.h>
#include <unistd.h>

#include <array>

#include "base/env.h"

namespace xd {

void log_line(std::string_view text) noexcept {
  const auto part = [](std::string_view bytes) {
    return iovec{const_cast<char*>(bytes.data()), bytes.size()};
  };
  const std::array line{part("crossdock: "), part(text), part("\n")};
  // A log that cannot be written has nowhere to be reported.
  [[maybe_unused]] const auto written =
      ::writev(STDERR_FILENO, line.data(), static_cast<int>(line.size()));
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
