// How operations end, for every executor.
#pragma once

#include <iosfwd>
#include <string>

#include "support/world.h"

namespace xd::test {

struct Outcome {
  xd_status status;
  std::string text;    // what the library says about it; empty after success
  xd_ep_status group;  // what the group's status was when the operation had ended
  xd_ep_status met;    // the non-fatal error, whoever told of it

  bool mentions(const std::string& part) const { return text.find(part) != std::string::npos; }
};

inline bool operator==(const Outcome& outcome, xd_status status) {
  return outcome.status == status;
}
void PrintTo(const Outcome& outcome, std::ostream* out);  // for GoogleTest

// Waits for the operation of which the call has returned `called`, and asks how it ended: where
// operations are asynchronous, errors that the device finds are known only then. Reads the group's
// status, and so clears it. Ask once for several operations that were enqueued on end.
Outcome finish(const Rank& rank, xd_ep_group* group, xd_status called);

inline void ok(const Outcome& outcome) {
  if (outcome.status != XD_SUCCESS) throw CallFailed(outcome.status, outcome.text);
}

}  // namespace xd::test
