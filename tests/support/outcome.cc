#include "support/outcome.h"

#include <ostream>

namespace xd::test {
namespace {

template <class Status>
void print(const OutcomeOf<Status>& outcome, std::ostream& out) {
  out << outcome.status << " (" << xd_status_name(outcome.status) << ": " << outcome.text << ")";
}

// `met`: the error that the call has told. `read_status`: reads the status of the group or context.
template <class Status, class ReadStatus>
OutcomeOf<Status> finish_with(const Rank& rank, xd_status called, const Status& met,
                              ReadStatus&& read_status) {
  OutcomeOf<Status> outcome{called, called == XD_SUCCESS ? "" : xd_last_error(), met, met};
  rank.memory->synchronize();
  outcome.group = read_status();
  if (met.status == XD_SUCCESS) outcome.met = outcome.group;
  if (called != XD_SUCCESS || !rank.asynchronous()) return outcome;
  const xd_error_info fatal = comm_error(rank.comm);
  if (fatal.status != XD_SUCCESS) {
    outcome.status = fatal.status;
    outcome.text = fatal.text;
  } else if (outcome.group.status != XD_SUCCESS) {
    outcome.status = outcome.group.status;
    outcome.text = outcome.group.text;
  }
  return outcome;
}

}  // namespace

void PrintTo(const Outcome& outcome, std::ostream* out) { print(outcome, *out); }
void PrintTo(const LlOutcome& outcome, std::ostream* out) { print(outcome, *out); }
void PrintTo(const GemmOutcome& outcome, std::ostream* out) { print(outcome, *out); }

Outcome finish(const Rank& rank, xd_ep_group* group, xd_status called) {
  return finish_with(rank, called, last_ep_error(), [&] { return group_status(group); });
}

LlOutcome finish(const Rank& rank, xd_ll_group* group, xd_status called) {
  return finish_with(rank, called, last_ll_error(), [&] { return group_status(group); });
}

GemmOutcome finish(const Rank& rank, xd_gemm_context* context, xd_status called) {
  return finish_with(rank, called, last_gemm_error(), [&] { return context_status(context); });
}

}  // namespace xd::test
