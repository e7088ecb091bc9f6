// The order of the parts of combine and dispatch_bwd in a group: between the first and the last one
// partial sums lie in group memory, so the group runs nothing else there but prepare.
//
// All ranks have seen the same turns, so they come to the same verdict, each by itself. Where they
// have not (a failure that one rank alone met), the rank that finds a mistake tells its peers.
#pragma once

#include <crossdock/ep.h>

#include <cstdint>
#include <utility>

#include "base/error.h"
#include "ep/bulk/family.h"
#include "ep/plan/parts.h"

namespace xd::ep {

class PartOrder {
 public:
  struct Step {
    xd_ep_operation operation;
    std::uint64_t plan;  // fingerprint
    CallPart part;
  };

  // Every turn begins with it, also a failed one. Sums that have been begun end here, unless the
  // turn calls advance() or resume().
  void begin() { open_ = std::exchange(kept_, {}); }

  // Throws INVALID_ARGUMENT unless the step may follow the turns before it.
  void require(const Step& step) const {
    if (open_.part == 0) {
      XD_REQUIRE(!sums(step.operation) || step.part.begins(), "part = ", step.part.part, " of ",
                 name(step.operation), ", expected 1: part ", step.part.part - 1,
                 " of this plan has not been run just before, or has failed");
      return;
    }
    XD_REQUIRE(step.operation == open_.operation && step.plan == open_.plan &&
                   step.part.part == open_.part,
               "part = ", step.part.part, " of ", name(step.operation), ", expected part ",
               open_.part, " of ", name(open_.operation), " on the plan of part ", open_.part - 1,
               ": nothing but prepare runs between its parts; part 1 begins anew");
  }

  // The step has come to its end.
  void advance(const Step& step) {
    if (sums(step.operation) && !step.part.ends()) {
      kept_ = {step.operation, step.plan, step.part.part + 1};
    }
  }
  // A prepare has come to its end.
  void resume() { kept_ = open_; }

 private:
  // Sums that have been begun, and the part that comes next; 0 = there are none.
  struct Open {
    xd_ep_operation operation = XD_EP_PREPARE;
    std::uint64_t plan = 0;
    int part = 0;
  };

  static bool sums(xd_ep_operation operation) {
    return operation == XD_EP_COMBINE || operation == XD_EP_DISPATCH_BWD;
  }
  static std::string name(xd_ep_operation operation) { return Family::kOperations.name(operation); }

  Open open_;  // before the current turn
  Open kept_;  // behind it
};

}  // namespace xd::ep
