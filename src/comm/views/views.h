// The views of a communicator, and the call by which its ranks decide on the next one.
#pragma once

#include <crossdock/view.h>

#include <mutex>
#include <vector>

#include "base/deadline.h"
#include "base/interrupt.h"
#include "comm/errors.h"
#include "comm/hosts.h"
#include "comm/views/far_decision.h"
#include "comm/views/near_decision.h"

namespace xd {

class Views {
 public:
  // All outlive the object.
  Views(const HostMap& hosts, Errors& errors)
      : hosts_(hosts),
        errors_(errors),
        view_{.members = Members::all(static_cast<int>(hosts.host_of().size()))},
        before_(view_) {}

  // The latest view that this rank knows, and the one that it knew before.
  struct Known {
    View now, before;
  };
  Known known() const;

  // As xd_comm_agree says. `timeout_ms`: resolved.
  Known agree(const Vote& vote, int timeout_ms);

 private:
  class SharedPlaces;

  int num_ranks() const { return static_cast<int>(hosts_.host_of().size()); }
  Outcome decide_near(const Vote& vote, int timeout_ms);
  Outcome decide_far(const Vote& vote, int timeout_ms);
  Members gone() const;
  void sleep(std::uint32_t rings, const Deadline& until, Interruption& interruption);
  void keep(const View& view);
  int place_in(const View& view) const;
  [[noreturn]] void fail_outside(Outcome outcome, bool was_member, int timeout_ms) const;
  std::vector<int> list(const Members& members) const;

  const HostMap& hosts_;
  Errors& errors_;
  std::mutex deciding_;  // one call at a time
  DecisionWord word_;    // of view_, where all ranks are near
  Card card_;
  Members missing_;  // when the last call ended
  mutable std::mutex mutex_;
  View view_, before_;
};

}  // namespace xd
