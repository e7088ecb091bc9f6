#include "comm/views/view.h"

namespace xd {

View Tally::view(const View& before) const {
  Members staying = voters.without(gone);
  Members left_out;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (!staying.has(rank)) continue;
    if (votes[r].leave != 0) {
      staying.remove(rank);
    } else if (before.members.has(rank) && !left_out.has(rank)) {
      left_out.add(votes[r].leave_out);
    }
  }
  View next{.number = before.number + 1, .members = staying.without(left_out)};
  const Members old = next.members.common(before.members);
  const Members& counted = old.count() > 0 ? old : next.members;
  const int lowest = counted.lowest();
  if (lowest < 0) return next;
  next.first_step = next.last_step = votes[at(lowest)].step;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    if (!counted.has(static_cast<int>(r))) continue;
    next.first_step = std::min(next.first_step, votes[r].step);
    next.last_step = std::max(next.last_step, votes[r].step);
    if (votes[r].ok == 0) next.all_ok = 0;
  }
  return next;
}

}  // namespace xd
