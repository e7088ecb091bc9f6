// Turns chunks of a rank's output into whole lines with a prefix.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace xd::run {

class Lines {
 public:
  // A line longer than this is cut into several, so that memory stays bounded.
  static constexpr std::size_t kLongest = 1 << 20;

  explicit Lines(std::string prefix) : prefix_(std::move(prefix)) {}

  // The lines that `chunk` completes, each with prefix and newline; the rest waits.
  std::string feed(std::string_view chunk);

  // The rest of a last line without a newline, with one added; empty if there is no rest.
  std::string finish();

 private:
  std::string prefix_;
  std::string rest_;
};

}  // namespace xd::run
