// The operations of a pass in their order, and how far this rank has come in them.
#pragma once

#include <crossdock/ep.h>

#include <algorithm>

namespace xd::moe {

class Turns {
 public:
  // `parts` calls of the operation that moves rows, or one (0), and as many of the one that sums
  // them. `late`: calls return before they hear of a peer's failure, so that peers make them all.
  Turns(xd_ep_operation moves, xd_ep_operation sums, int parts, bool late)
      : moves_(moves), sums_(sums), calls_(std::max(parts, 1)), late_(late) {}

  int calls() const { return calls_; }
  // Begins this rank's turn in the next operation.
  xd_ep_operation enter() {
    inside_ = true;
    return taken_++ < calls_ ? moves_ : sums_;
  }
  void leave() { inside_ = false; }
  // The error in flight is that of an operation, whose turn has been taken with it.
  bool inside() const { return inside_; }
  // The turns that peers wait for after an error here. Peers that hear of it in their own call make
  // no further one.
  int owed() const {
    const int left = 2 * calls_ - taken_;
    return late_ ? left : std::min(left, inside_ ? 0 : 1);
  }

 private:
  const xd_ep_operation moves_, sums_;
  const int calls_;
  const bool late_;
  int taken_ = 0;
  bool inside_ = false;
};

}  // namespace xd::moe
