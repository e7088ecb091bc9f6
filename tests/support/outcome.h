// How operations end, for every executor.
#pragma once

#include <iosfwd>
#include <string>

#include "support/world.h"

namespace xd::test {

struct Outcome {
  xd_status status;
  std::string text;    // the library's error text; empty after success
  xd_ep_status group;  // the group's status when the operation had ended
  xd_ep_status met;    // the non-fatal error, told by the call or by the group

  bool mentions(const std::string& part) const { return text.find(part) != std::string::npos; }
};

inline bool operator==(const Outcome& outcome, xd_status status) {
  return outcome.status == status;
}
void PrintTo(const Outcome& outcome, std::ostream* out);  // for GoogleTest

// Waits for the operation whose call has returned `called`, and asks how it ended: where operations
// are asynchronous, errors that the device finds are known only then. It reads the group's status,
// and so clears it. Call it once for several operations that were enqueued in a row.
Outcome finish(const Rank& rank, xd_ep_group* group, xd_status called);

inline void ok(const Outcome& outcome) {
  if (outcome.status != XD_SUCCESS) throw CallFailed(outcome.status, outcome.text);
}

}  // namespace xd::test
