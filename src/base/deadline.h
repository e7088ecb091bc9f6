// A point in time that a wait must not pass.
#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>

namespace xd {

class Deadline {
 public:
  using Clock = std::chrono::steady_clock;

  static Deadline after_ms(std::int64_t ms) {
    return Deadline(Clock::now() + std::chrono::milliseconds(ms));
  }
  explicit Deadline(Clock::time_point when) : when_(when) {}

  Clock::time_point when() const { return when_; }
  bool passed() const { return Clock::now() >= when_; }
  // Whole milliseconds left, rounded up so that poll() does not spin through the last one; >= 0.
  int remaining_ms() const {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(when_ - Clock::now()).count();
    return static_cast<int>(std::clamp<std::int64_t>(left, 0, 1'000'000'000));
  }

 private:
  Clock::time_point when_;
};

}  // namespace xd
