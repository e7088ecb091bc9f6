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
//
// It is plain data: kernels have theirs in device memory, where zeros are an order in which nothing
// is under way.
#pragma once

#include <array>
#include <string>

#include "ep/bulk/family.h"
#include "ep/plan/parts.h"

namespace xd::ep {

// The operations whose parts keep sums.
constexpr bool makes_sums(int operation) {
  return operation == XD_EP_COMBINE || operation == XD_EP_DISPATCH_BWD;
}

struct OrderFault;

class PartOrder {
 public:
  // The receive tensors that are staged on this rank. A tensor without rows is not.
  struct Staged {
    bool rows = false, scales = false;
  };
  struct Step {
    Record record;  // `fingerprint`: the plan's, without the part
    CallPart part;
    Staged staged;
  };

  // Operations of rows that may be under way. One more, and the one whose last part is the longest
  // ago has to begin anew.
  static constexpr int kMostUnderWay = 8;

  // ---- On the host: every turn begins with begin(), also a failed one. All that is under way ends
  // there, unless the turn before has called advance() or resume().

  void begin() {
    if (!succeeded_) clear();
    succeeded_ = false;
  }
  // Throws INVALID_ARGUMENT unless the step may follow the turns before it.
  void require(const Step& step) const;
  // A prepare has come to its end.
  void resume() { succeeded_ = true; }

  // ---- On host and device

  constexpr OrderFault fault(const Step& step) const;
  // The step has come to its end.
  constexpr void advance(const Step& step);
  // All that is under way ends.
  constexpr void clear() {
    num_moves_ = 0;
    has_sums_ = false;
  }
  // True between the first and the last part of sums: then a whole operation is a fault as well.
  constexpr bool has_sums() const { return has_sums_; }

 private:
  static constexpr bool makes_sums(const Step& step) {
    return ep::makes_sums(step.record.call.operation);
  }
  static constexpr bool same(const Step& a, const Step& b) {
    return a.record.call.operation == b.record.call.operation &&
           a.record.fingerprint == b.record.fingerprint;
  }
  // Its next part comes behind `step`, its last one.
  constexpr const Step* find(const Step& step) const;
  constexpr void forget(const Step& step);

  // The last parts of operations under way, the latest one last. Sums are alone of their kind.
  std::array<Step, kMostUnderWay> moves_{};
  int num_moves_ = 0;
  Step sums_{};
  bool has_sums_ = false;
  bool succeeded_ = false;  // the current turn, or where none is running the last one
};

// The mistake of a step that may not follow the turns before it.
struct OrderFault {
  enum Kind : std::int32_t {
    none,
    between,  // the parts of the sums `before`
    begins,   // nothing comes before it
    order,    // another part than `before`'s next one
    tensors,  // others than `before`'s
    rows,     // lie elsewhere than `before`'s
    scales    // likewise
  };
  Kind kind = none;
  PartOrder::Step step{}, before{};

  constexpr explicit operator bool() const { return kind != none; }
};
std::string text_of(const OrderFault& fault);

constexpr const PartOrder::Step* PartOrder::find(const Step& step) const {
  if (makes_sums(step)) return has_sums_ && same(sums_, step) ? &sums_ : nullptr;
  for (int i = 0; i < num_moves_; ++i) {
    const Step& move = moves_[static_cast<std::size_t>(i)];
    if (same(move, step)) return &move;
  }
  return nullptr;
}

constexpr OrderFault PartOrder::fault(const Step& step) const {
  const Step* const before = find(step);
  const bool follows = before != nullptr && step.part.part == before->part.part + 1;
  if (has_sums_ && !(makes_sums(step) && step.part.part == 1) && !(before == &sums_ && follows)) {
    return {OrderFault::between, step, sums_};
  }
  if (step.part.begins()) return {};
  if (before == nullptr) return {OrderFault::begins, step, {}};
  const auto fault_of = [&](OrderFault::Kind kind) { return OrderFault{kind, step, *before}; };
  if (!follows) return fault_of(OrderFault::order);
  if (!same_operation(step.record, before->record)) return fault_of(OrderFault::tensors);
  if (step.staged.rows != before->staged.rows) return fault_of(OrderFault::rows);
  if (step.staged.scales != before->staged.scales) return fault_of(OrderFault::scales);
  return {};
}

constexpr void PartOrder::forget(const Step& step) {
  int kept = 0;
  for (int i = 0; i < num_moves_; ++i) {
    const Step& move = moves_[static_cast<std::size_t>(i)];
    if (!same(move, step)) moves_[static_cast<std::size_t>(kept++)] = move;
  }
  num_moves_ = kept;
}

constexpr void PartOrder::advance(const Step& step) {
  succeeded_ = true;
  if (step.part.whole()) return;
  if (makes_sums(step)) {
    has_sums_ = !step.part.ends();
    sums_ = step;
    return;
  }
  forget(step);
  if (step.part.ends()) return;
  if (num_moves_ == kMostUnderWay) forget(Step(moves_[0]));
  moves_[static_cast<std::size_t>(num_moves_++)] = step;
}

}  // namespace xd::ep
