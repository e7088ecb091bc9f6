// A limit on warnings about strangers and peers, who may cause thousands a second.
#pragma once

#include <string>
#include <string_view>

#include "base/deadline.h"
#include "base/log.h"

namespace xd {

// Prints the first few warnings of each interval, counts the rest, and says how many there were
// when the next interval begins, or when the object goes. One thread uses it.
class WarningLimit {
 public:
  static constexpr int kLines = 10;
  static constexpr int kIntervalMs = 10'000;

  // `what` names the things that are counted: "connections refused".
  explicit WarningLimit(const char* what) : what_(what) {}
  WarningLimit(const WarningLimit&) = delete;
  WarningLimit& operator=(const WarningLimit&) = delete;
  ~WarningLimit() { sum_up(); }

  void warn(std::string_view text) noexcept {
    if (interval_.passed()) {
      sum_up();
      interval_ = Deadline::after_ms(kIntervalMs);
      lines_ = 0;
    }
    if (lines_ < kLines) {
      ++lines_;
      log_warning(text);
    } else {
      ++untold_;
    }
  }

 private:
  void sum_up() noexcept {
    if (untold_ > 0) log_warning(untold_, " more ", what_);
    untold_ = 0;
  }

  const char* what_;
  Deadline interval_ = Deadline::after_ms(0);
  int lines_ = 0;
  int untold_ = 0;
};

}  // namespace xd
