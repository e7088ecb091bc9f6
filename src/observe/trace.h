// Spans of time for viewers of traces (Perfetto, chrome://tracing). Off unless XD_TRACE names a
// folder: there each process writes a file of its own, <host>-<pid>.trace.json, in the JSON array
// format, in which a viewer needs no end. Times are of CLOCK_MONOTONIC, which all processes of a
// machine share.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

#include "base/env.h"
#include "observe/counters.h"

namespace xd::observe {

inline bool tracing() {
  static const bool on = !env().trace.empty();
  return on;
}

// A line of a trace, for the spans of one subject. Without tracing it does nothing.
class Track {
 public:
  Track() = default;
  // Begins a line, with a number that no other line of this process has.
  explicit Track(const Identity& identity);

  bool on() const { return number_ != 0; }
  void set_title(std::string_view title) const noexcept;
  // `detail` goes beside the span; may be null.
  void span(const char* name, std::uint64_t begin_ns, std::uint64_t end_ns,
            const char* detail) const noexcept;
  // Brings all spans so far into the file.
  static void flush() noexcept;

 private:
  std::uint64_t number_ = 0;
};

}  // namespace xd::observe
