#include "support/outcome.h"

#include <ostream>

namespace xd::test {

void PrintTo(const Outcome& outcome, std::ostream* out) {
  *out << outcome.status << " (" << xd_status_name(outcome.status) << ": " << outcome.text << ")";
}

Outcome finish(const Rank& rank, xd_ep_group* group, xd_status called) {
  Outcome outcome{called, called == XD_SUCCESS ? "" : xd_last_error(), XD_EP_STATUS_INIT,
                  XD_EP_STATUS_INIT};
  ok(xd_ep_last_error(&outcome.met));
  rank.memory->synchronize();
  outcome.group = group_status(group);
  if (outcome.met.status == XD_SUCCESS) outcome.met = outcome.group;
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

}  // namespace xd::test
