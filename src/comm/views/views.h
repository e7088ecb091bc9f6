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
  // All outlive the object. `joined`: this rank has come later, and is a guest until a call
  // succeeds: its view has only itself.
  Views(const HostMap& hosts, Errors& errors, bool joined)
      : hosts_(hosts),
        errors_(errors),
        is_alone_(joined),
        view_{.members = joined ? Members::of(hosts.self())
                                : Members::all(static_cast<int>(hosts.host_of().size()))},
        before_(view_),
        given_(view_) {}

  // The latest view that this rank knows, and the one that a call had given before.
  struct Known {
    View now, before;
  };
  Known known() const;

  // As xd_comm_agree says. `timeout_ms`: resolved.
  Known agree(const Vote& wish, int timeout_ms);

 private:
  class SharedPlaces;

  int num_ranks() const { return static_cast<int>(hosts_.host_of().size()); }
  // The view that the next decision stands on, as this rank knows it.
  View basis() const;
  Outcome decide_near(const Vote& vote, int timeout_ms);
  Outcome decide_far(const Vote& vote, int timeout_ms);
  void wait_near(NearDecision& decision, NearPlaces& places, int timeout_ms);
  void wait_far(FarDecision& decision, int timeout_ms);
  void publish(const FarDecision& decision);
  Members gone() const;
  void sleep(std::uint32_t rings, const Deadline& until, Interruption& interruption);
  void keep(const View& view);
  Known give();
  [[noreturn]] void fail_outside(Outcome outcome, bool was_member, int timeout_ms) const;
  std::vector<int> list(const Members& members) const;

  const HostMap& hosts_;
  Errors& errors_;
  std::mutex deciding_;  // one call at a time
  bool is_alone_;        // a guest that knows no view of the others yet
  std::uint64_t calls_ = 0;
  Card card_;
  Members missing_;  // when the last call ended
  mutable std::mutex mutex_;
  View view_, before_;
  View given_;  // by the last call that succeeded
};

}  // namespace xd
