#include "ep/bulk/part_order.h"

#include <algorithm>
#include <span>
#include <string>

#include "base/error.h"
#include "base/math.h"

namespace xd::ep {
namespace {

bool makes_sums(const PartOrder::Step& step) {
  const int operation = step.record.call.operation;
  return operation == XD_EP_COMBINE || operation == XD_EP_DISPATCH_BWD;
}
std::string name(const PartOrder::Step& step) {
  return Family::kOperations.name(step.record.call.operation);
}
bool same(const PartOrder::Step& a, const PartOrder::Step& b) {
  return a.record.call.operation == b.record.call.operation &&
         a.record.fingerprint == b.record.fingerprint;
}

void require_tensors(const PartOrder::Step& step, const PartOrder::Step& before) {
  XD_REQUIRE(same_operation(step.record, before.record), "part = ", step.part.part, " of ",
             name(step), ", expected the tensors of part 1 (",
             Family::difference(step.record, before.record), ")");
  const auto require_place = [&](bool staged, bool was_staged, const char* what) {
    XD_REQUIRE(staged == was_staged, "part = ", step.part.part, " of ", name(step), ": ", what,
               was_staged ? " lie in symmetric memory, expected them outside it"
                          : " lie outside symmetric memory, expected them in it",
               " as those of part 1");
  };
  require_place(step.staged.rows, before.staged.rows, "receive rows");
  require_place(step.staged.scales, before.staged.scales, "receive scales");
}

}  // namespace

void PartOrder::begin() {
  if (!succeeded_) {
    num_moves_ = 0;
    has_sums_ = false;
  }
  succeeded_ = false;
}

const PartOrder::Step* PartOrder::find(const Step& step) const {
  if (makes_sums(step)) return has_sums_ && same(sums_, step) ? &sums_ : nullptr;
  const auto moves = std::span(moves_).first(at(num_moves_));
  const auto found = std::ranges::find_if(moves, [&](const Step& m) { return same(m, step); });
  return found != moves.end() ? &*found : nullptr;
}

void PartOrder::require(const Step& step) const {
  const Step* const before = find(step);
  const int part = step.part.part;
  if (has_sums_ && !(makes_sums(step) && part == 1)) {
    XD_REQUIRE(before == &sums_ && part == sums_.part.part + 1, "part = ", part, " of ", name(step),
               ", expected part ", sums_.part.part + 1, " of ", name(sums_),
               " on the plan of part ", sums_.part.part,
               ": nothing but prepare runs between its parts");
  }
  if (step.part.begins()) return;
  XD_REQUIRE(before != nullptr, "part = ", part, " of ", name(step), ", expected 1: part ",
             part - 1,
             " of this plan has not been run, an operation has failed since, or more "
             "than ",
             kMostUnderWay, " were under way");
  XD_REQUIRE(part == before->part.part + 1, "part = ", part, " of ", name(step), ", expected ",
             before->part.part + 1, ", the next one of this plan, or 1");
  require_tensors(step, *before);
}

void PartOrder::forget(const Step& step) {
  const auto moves = std::span(moves_).first(at(num_moves_));
  const auto rest = std::ranges::remove_if(moves, [&](const Step& m) { return same(m, step); });
  num_moves_ -= static_cast<int>(rest.size());
}

void PartOrder::advance(const Step& step) {
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
  moves_[at(num_moves_++)] = step;
}

}  // namespace xd::ep
