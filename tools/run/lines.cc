#include "lines.h"

#include <algorithm>

namespace xd::run {

std::string Lines::feed(std::string_view chunk) {
  std::string lines;
  while (!chunk.empty()) {
    const auto newline = chunk.find('\n');
    const auto length = std::min({newline, chunk.size(), kLongest - rest_.size()});
    rest_ += chunk.substr(0, length);
    chunk.remove_prefix(length);
    const bool complete = length == newline;
    if (complete) chunk.remove_prefix(1);
    if (complete || (rest_.size() == kLongest && !chunk.empty())) {
      lines += prefix_ + rest_ + '\n';
      rest_.clear();
    }
  }
  return lines;
}

std::string Lines::finish() {
  if (rest_.empty()) return {};
  std::string line = prefix_ + rest_ + '\n';
  rest_.clear();
  return line;
}

}  // namespace xd::run
