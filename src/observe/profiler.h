// Ranges for profilers that show what calls of the library a thread is in (NVTX, as Nsight Systems
// does). Without a profiler that listens, a range costs a look at a pointer.
#pragma once

#include "observe/counters.h"

namespace xd::observe {

class ProfilerRange {
 public:
  // Is called "function name", where the name may be empty.
  ProfilerRange(const char* function, const Text& name) : on_(begin(function, name)) {}
  ~ProfilerRange() {
    if (on_) end();
  }
  ProfilerRange(const ProfilerRange&) = delete;
  ProfilerRange& operator=(const ProfilerRange&) = delete;

  // Whether a profiler listens in this process.
  static bool listens();

 private:
  static bool begin(const char* function, const Text& name);
  static void end();

  const bool on_;
};

}  // namespace xd::observe
