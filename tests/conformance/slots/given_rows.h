// Whether dispatch of low latency takes rows that are given in this launch (Sent): bytes with
// scales of the caller's. Kernels do not so far.
#pragma once

#include <vector>

#include "conformance/slots/case.h"
#include "support/gtest_main.h"

namespace xd::test {

inline bool has_given_rows() { return world().memory().device().device_type == kDLCPU; }

// The cases as this launch can have them: where rows are not given, they are as they are.
inline std::vector<LlCase> cases_here(std::vector<LlCase> cases) {
  for (LlCase& c : cases) {
    if (is_given(c.sent) && !has_given_rows()) c.sent = Sent::as_they_are;
  }
  return cases;
}

}  // namespace xd::test
