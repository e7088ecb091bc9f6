// The modes of a thread's floating-point arithmetic while an operation computes on it.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace xd {

// From here to the end of the scope this thread rounds to nearest and computes with denormal
// numbers, and no exception traps; then its caller finds its own modes and flags again. Frameworks
// run their threads with denormal numbers flushed to zero, and bits must not depend on that.
class StandardFloatModes {
 public:
#if defined(__x86_64__)
  // The whole environment would include the x87 unit's, which takes longer than a small operation
  // can spare, and which nothing here computes with.
  StandardFloatModes() : callers_(_mm_getcsr()) { _mm_setcsr(kPowerOn); }
  ~StandardFloatModes() { _mm_setcsr(callers_); }
#else
  StandardFloatModes() {
    std::fegetenv(&callers_);
    std::fesetenv(FE_DFL_ENV);
  }
  ~StandardFloatModes() { std::fesetenv(&callers_); }
#endif
  StandardFloatModes(const StandardFloatModes&) = delete;
  StandardFloatModes& operator=(const StandardFloatModes&) = delete;

 private:
#if defined(__x86_64__)
  // Rounding to nearest, every exception masked, no FTZ, no DAZ.
  static constexpr unsigned kPowerOn = 0x1f80;
  const unsigned callers_;
#else
  std::fenv_t callers_;
#endif
};

}  // namespace xd
