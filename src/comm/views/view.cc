#include "comm/views/view.h"

namespace xd {

View Tally::view(const View& before) const {
  Members left_out;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (voters.has(rank) && !left_out.has(rank)) left_out.add(votes[r].leave_out);
  }
  View next{.number = before.number + 1, .members = voters.without(gone).without(left_out)};
  bool first = true;
  for (std::size_t r = 0; r < votes.size(); ++r) {
    const int rank = static_cast<int>(r);
    if (!next.members.has(rank)) continue;
    const Vote& vote = votes[r];
    if (vote.leave != 0) {
      next.members.remove(rank);
      continue;
    }
    next.first_step = first ? vote.step : std::min(next.first_step, vote.step);
    next.last_step = first ? vote.step : std::max(next.last_step, vote.step);
    if (vote.ok == 0) next.all_ok = 0;
    first = false;
  }
  return next;
}

}  // namespace xd
