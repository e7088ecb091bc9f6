// How operations end, for every executor and every family.
#pragma once

#include <iosfwd>
#include <string>

#include "support/world.h"

namespace xd::test {

// `Status`: xd_ep_status, xd_ll_status or xd_gemm_status.
template <class Status>
struct OutcomeOf {
  xd_status status;
  std::string text;  // the library's error text; empty after success
  Status group;      // the status of the group or context when the operation had ended
  Status met;        // the non-fatal error, told by the call or by the group

  bool mentions(const std::string& part) const { return text.find(part) != std::string::npos; }
  bool operator==(xd_status other) const { return status == other; }
};
using Outcome = OutcomeOf<xd_ep_status>;
using LlOutcome = OutcomeOf<xd_ll_status>;
using GemmOutcome = OutcomeOf<xd_gemm_status>;

void PrintTo(const Outcome& outcome, std::ostream* out);  // for GoogleTest
void PrintTo(const LlOutcome& outcome, std::ostream* out);
void PrintTo(const GemmOutcome& outcome, std::ostream* out);

// Waits for the operation whose call has returned `called`, and asks how it ended: where operations
// are asynchronous, errors that the device finds are known only then. It reads the status of the
// group or context, and so clears it. Call it once for several operations that were enqueued in a
// row.
Outcome finish(const Rank& rank, xd_ep_group* group, xd_status called);
LlOutcome finish(const Rank& rank, xd_ll_group* group, xd_status called);
GemmOutcome finish(const Rank& rank, xd_gemm_context* context, xd_status called);

template <class Status>
void ok(const OutcomeOf<Status>& outcome) {
  if (outcome.status != XD_SUCCESS) throw CallFailed(outcome.status, outcome.text);
}

}  // namespace xd::test
