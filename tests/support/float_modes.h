// Modes of floating-point arithmetic that a caller's thread may be in.
#pragma once

#include <cfenv>

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace xd::test {

enum class FloatMode {
  flushing,  // FTZ and DAZ: denormal results and operands count as zero. x86-64 only
  upward,    // rounds towards infinity
};

// The calling thread is in this mode until the end of the scope. The test's own arithmetic there is
// in that mode as well.
class InFloatMode {
 public:
  explicit InFloatMode(FloatMode mode) {
    std::fegetenv(&before_);
    if (mode == FloatMode::upward) std::fesetround(FE_UPWARD);
#if defined(__x86_64__)
    if (mode == FloatMode::flushing) _mm_setcsr(_mm_getcsr() | 0x8040);
    inside_ = modes();
#endif
  }
  ~InFloatMode() { std::fesetenv(&before_); }
  InFloatMode(const InFloatMode&) = delete;
  InFloatMode& operator=(const InFloatMode&) = delete;

  // True if the modes are still those that the scope began with.
  bool untouched() const {
#if defined(__x86_64__)
    return modes() == inside_;
#else
    return true;
#endif
  }

 private:
  std::fenv_t before_;
#if defined(__x86_64__)
  static unsigned modes() { return _mm_getcsr() & ~0x3fu; }  // without the flags of exceptions
  unsigned inside_ = 0;
#endif
};

}  // namespace xd::test
