// The order of the parts of operations in a group.
//
// Between the first and the last part of combine and dispatch_bwd partial sums lie in group memory,
// so the group runs nothing else there but prepare. Rows of dispatch and combine_bwd lie in the
// caller's memory, so anything may run between their parts; but a row that crosses once for several
// zones does so in the first of their parts, so no later part may follow one that did not succeed.
//
// All ranks have seen the same turns, and they compare their records, so they come to the same
// verdict, each by itself. Where they do not (a failure that one rank alone met, a tensor that lies
// elsewhere), the rank that finds a mistake tells its peers.
#pragma once

#include <array>

#include "ep/bulk/family.h"
#include "ep/plan/parts.h"

namespace xd::ep {

class PartOrder {
 public:
  // The receive tensors that are staged on this rank. A tensor without rows is not.
  struct Staged {
    bool rows = false, scales = false;
    bool operator==(const Staged&) const = default;
  };
  struct Step {
    Record record;  // `fingerprint`: the plan's, without the part
    CallPart part;
    Staged staged;
  };

  // Operations of rows that may be under way. One more, and the one whose last part is the longest
  // ago has to begin anew.
  static constexpr int kMostUnderWay = 8;

  // Every turn begins with it, also a failed one. All that is under way ends here, unless the turn
  // before has called advance() or resume().
  void begin();

  // Throws INVALID_ARGUMENT unless the step may follow the turns before it.
  void require(const Step& step) const;

  // The step has come to its end.
  void advance(const Step& step);
  // A prepare has come to its end.
  void resume() { succeeded_ = true; }

 private:
  // Its next part comes behind `step`, its last one.
  const Step* find(const Step& step) const;
  void forget(const Step& step);

  // The last parts of operations under way, the latest one last. Sums are alone of their kind.
  std::array<Step, kMostUnderWay> moves_{};
  int num_moves_ = 0;
  Step sums_{};
  bool has_sums_ = false;
  bool succeeded_ = false;  // the current turn, or where none is running the last one
};

}  // namespace xd::ep
