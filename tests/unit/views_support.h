// The views and votes with which tests of decisions begin, and how much they explore.
#pragma once

#include <vector>

#include "base/math.h"
#include "comm/views/view.h"

namespace xd::test {

// Sanitizers look at the code, which two ranks run as well, and take twenty times as long: they get
// a part of the orders.
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
inline constexpr bool kSanitized = true;
#else
inline constexpr bool kSanitized = false;
#endif

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
