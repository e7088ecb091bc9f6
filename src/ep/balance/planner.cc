#include "ep/balance/planner.h"

#include <algorithm>
#include <utility>

#include "ep/balance/assignment.h"
#include "ep/balance/exchanges.h"
#include "ep/balance/starts.h"

namespace xd::ep {

namespace {

// The better of two: of equals, and of those that are nearly as good, `first`.
Assignment better(Assignment first, Assignment second, std::int64_t slack) {
  return second.busiest_load() < first.busiest_load() - slack ? std::move(second)
                                                              : std::move(first);
}

Assignment from_scratch(const Problem& p) {
  const std::int64_t little = p.mean / 2048;
  Assignment ours = start_from_scratch(p);
  even_out(ours, p.mean + little, 1);
  Assignment published = start_as_published(p);
  const std::int64_t rounding = p.mean >> 20;  // of shares, and far more
  const bool is_behind = ours.busiest_load() > published.busiest_load() + rounding;
  even_out(published, p.mean + little, 1);
  // The published method does not know hosts, and a little is not worth replicas side by side; but
  // no placement is busier than that method's.
  const std::int64_t allowed = p.several_hosts() ? p.slack : is_behind ? 0 : little;
  Assignment best = better(std::move(ours), std::move(published), allowed);
  best.keep_at_home();
  return best;
}

// Of the current placement with few changes: exchanges alone may do, and replicas may help.
Assignment from_current(const Problem& p) {
  const std::int64_t enough = p.mean + p.slack;
  // An exchange that takes less is not worth its moves.
  const std::int64_t least_gain = std::max<std::int64_t>(p.slack / 4, 1);
  Assignment kept = start_from_current(p);
  if (kept.busiest_load() <= enough) return kept;
  Assignment exchanged = kept;
  exchange_replicas(exchanged);
  even_out(exchanged, enough, least_gain);
  if (exchanged.busiest_load() <= enough) return exchanged;
  even_out(kept, enough, least_gain);
  return better(std::move(kept), std::move(exchanged), least_gain);
}

Assignment best_of(const Problem& p) {
  if (!p.has_current()) return from_scratch(p);
  Assignment current = from_current(p);
  if (current.busiest_load() <= p.mean + p.slack) return current;
  Assignment scratch = from_scratch(p);
  if (scratch.moves() > p.max_moves) return current;
  return better(std::move(current), std::move(scratch), p.slack);
}

// The load of some ranks over what so many have at the mean.
double over(const Assignment& a, std::int64_t load, std::int64_t ranks) {
  std::int64_t all = 0;  // kAllLoad but for rounding
  for (int r = 0; r < a.problem().ranks; ++r) all += a.load(r);
  return static_cast<double>(load * a.problem().used_ranks) / static_cast<double>(all * ranks);
}

double busiest_host(const Assignment& a) {
  const Problem& p = a.problem();
  double busiest = 0;
  for (int host = 0; host < p.ranks; ++host) {
    std::int64_t load = 0, ranks = 0;
    for (int r = 0; r < p.ranks; ++r) {
      if (p.hosts[at(r)] != host || p.room[at(r)] == 0) continue;
      load += a.load(r);
      ++ranks;
    }
    if (ranks > 0) busiest = std::max(busiest, over(a, load, ranks));
  }
  return busiest;
}

// The busiest rank of the current placement over the mean; 0 where it lacks an expert.
double busiest_before(const Problem& p) {
  if (!p.has_current()) return 0;
  Assignment a(p);
  for (int s = 0; s < p.ranks * p.slots; ++s) {
    const int expert = p.current[at(s)];
    if (s % p.slots < p.room[at(s / p.slots)] && expert != kEmpty) a.add(s / p.slots, expert);
  }
  for (int e = 0; e < p.experts; ++e) {
    if (a.replicas(e) == 0) return 0;
  }
  return over(a, a.busiest_load(), 1);
}

}  // namespace

PlannedPlacement plan_placement(const Problem& problem) {
  const Assignment best = best_of(problem);
  xd_ep_placement_info info XD_EP_PLACEMENT_INFO_INIT;
  info.busiest_rank = over(best, best.busiest_load(), 1);
  info.busiest_host = busiest_host(best);
  info.busiest_rank_before = busiest_before(problem);
  info.moves = best.moves();
  info.doubles = best.doubles();
  return {best.table(), info};
}

std::vector<xd_ep_move> placement_moves(int ranks, int slots, const std::int32_t* from,
                                        const std::int32_t* to) {
  const int all = ranks * slots;
  std::int32_t most = kEmpty;
  for (int s = 0; s < all; ++s) {
    XD_REQUIRE(from[s] >= kEmpty, "from[", s, "] = ", from[s], ", expected -1 or an expert");
    XD_REQUIRE(to[s] >= kEmpty, "to[", s, "] = ", to[s], ", expected -1 or an expert");
    XD_REQUIRE(from[s] < XD_EP_MAX_EXPERTS && to[s] < XD_EP_MAX_EXPERTS, "slot ", s,
               ": expected experts below ", XD_EP_MAX_EXPERTS, ", got ", std::max(from[s], to[s]));
    most = std::max({most, from[s], to[s]});
  }
  std::vector<std::vector<int>> holders(at(most + 1));
  for (int s = 0; s < all; ++s) {
    if (from[s] != kEmpty) holders[at(from[s])].push_back(s);
  }
  std::vector<int> reads(at(ranks));
  std::vector<xd_ep_move> moves;
  for (int s = 0; s < all; ++s) {
    if (to[s] == kEmpty || to[s] == from[s]) continue;
    int source = -1;
    const auto key = [&](int slot) {
      return std::pair(slot / slots != s / slots, reads[at(slot / slots)]);
    };
    for (const int slot : holders[at(to[s])]) {
      if (source < 0 || key(slot) < key(source)) source = slot;
    }
    if (source >= 0 && source / slots != s / slots) ++reads[at(source / slots)];
    moves.push_back({to[s], source, s});
  }
  return moves;
}

}  // namespace xd::ep
