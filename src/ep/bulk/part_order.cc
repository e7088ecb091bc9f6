#include "ep/bulk/part_order.h"

#include <string>

#include "base/error.h"

namespace xd::ep {
namespace {

std::string name(const PartOrder::Step& step) {
  return Family::kOperations.name(step.record.call.operation);
}

std::string elsewhere(const std::string& begin, const char* what, bool was_staged) {
  return concat(begin, ": ", what,
                was_staged ? " lie in symmetric memory, expected them outside it"
                           : " lie outside symmetric memory, expected them in it",
                " as those of part 1");
}

}  // namespace

std::string text_of(const OrderFault& fault) {
  const auto& [kind, step, before] = fault;
  const int part = step.part.part;
  const std::string begin = concat("part = ", part, " of ", name(step));
  switch (kind) {
    case OrderFault::none:
      break;
    case OrderFault::between:
      return concat(begin, ", expected part ", before.part.part + 1, " of ", name(before),
                    " on the plan of part ", before.part.part,
                    ": nothing but prepare runs between its parts");
    case OrderFault::begins:
      return concat(begin, ", expected 1: part ", part - 1,
                    " of this plan has not been run, an operation has failed since, or more than ",
                    PartOrder::kMostUnderWay, " were under way");
    case OrderFault::order:
      return concat(begin, ", expected ", before.part.part + 1,
                    ", the next one of this plan, or 1");
    case OrderFault::tensors:
      return concat(begin, ", expected the tensors of part 1 (",
                    Family::difference(step.record, before.record), ")");
    case OrderFault::rows:
      return elsewhere(begin, "receive rows", before.staged.rows);
    case OrderFault::scales:
      return elsewhere(begin, "receive scales", before.staged.scales);
  }
  return "part: unknown fault";
}

void PartOrder::require(const Step& step) const {
  if (const OrderFault found = fault(step)) {
    throw Error(XD_ERROR_INVALID_ARGUMENT, text_of(found));
  }
}

}  // namespace xd::ep
