// The views and votes with which tests of decisions begin.
#pragma once

#include <vector>

#include "base/math.h"
#include "comm/views/view.h"

namespace xd::test {

// View 0 of these ranks, as bits.
inline View first_view(unsigned members) {
  View view;
  view.members = Members(Members::Words{members});
  return view;
}

// Rank r is at step 10 + r.
inline std::vector<Vote> votes_of(int num_ranks) {
  std::vector<Vote> votes(at(num_ranks));
  for (int r = 0; r < num_ranks; ++r) votes[at(r)].step = 10 + r;
  return votes;
}

}  // namespace xd::test
