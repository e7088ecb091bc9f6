#include "ep/balance/starts.h"

#include <algorithm>
#include <cstdlib>
#include <numeric>
#include <queue>

namespace xd::ep {

namespace {

// The slots that can be used if no rank holds an expert twice.
int distinct_slots(const Problem& p) {
  int sum = 0;
  for (const int room : p.room) sum += std::min(room, p.experts);
  return sum;
}

// The number of replicas of each expert: the one with the largest share gets the next.
std::vector<int> share_out(const Problem& p, int slots, int most_each) {
  struct Next {
    std::int64_t share;
    int expert;
    bool operator<(const Next& other) const {
      return share != other.share ? share < other.share : expert > other.expert;
    }
  };
  std::vector<int> replicas(at(p.experts), 1);
  std::priority_queue<Next> next;
  for (int e = 0; e < p.experts && most_each > 1; ++e) next.push({p.loads[at(e)], e});
  for (int left = slots - p.experts; left > 0 && !next.empty(); --left) {
    const int e = next.top().expert;
    next.pop();
    const int now = ++replicas[at(e)];
    if (now < most_each) next.push({p.loads[at(e)] / now, e});
  }
  return replicas;
}

std::vector<int> largest_first(const Assignment& a) {
  std::vector<int> experts(at(a.problem().experts));
  std::iota(experts.begin(), experts.end(), 0);
  std::ranges::stable_sort(experts, std::greater{}, [&](int e) { return a.share(e); });
  return experts;
}

// The lightest rank that may take the expert; -1 = none. Hosts with fewer of its replicas come
// first.
int lightest_for(const Assignment& a, int expert) {
  int best = -1;
  const auto key = [&](int r) { return std::pair(a.replicas_on_host_of(r, expert), a.load(r)); };
  for (int r = 0; r < a.problem().ranks; ++r) {
    if (!a.has_room(r) || a.holds(r, expert)) continue;
    if (best < 0 || key(r) < key(best)) best = r;
  }
  return best;
}

// Makes room for an expert that all ranks with room hold: another expert goes there from a rank
// that then takes this one. Returns whether there is such a pair.
bool make_way(Assignment& a, int expert) {
  const Problem& p = a.problem();
  for (int with_room = 0; with_room < p.ranks; ++with_room) {
    if (!a.has_room(with_room)) continue;
    for (int r = 0; r < p.ranks; ++r) {
      if (a.holds(r, expert)) continue;
      for (const int other : a.experts_of(r)) {
        if (a.holds(with_room, other)) continue;
        a.remove(r, other);
        a.add(with_room, other);
        a.add(r, expert);
        return true;
      }
    }
  }
  return false;
}

// The rank and expert of a replica that may give way to `expert`: `spare(v)` says whether v has one
// too many. The one after which the others of v have the smallest share; rank -1 = none.
struct Place {
  int rank = -1, expert = -1;
};
template <class Spare>
Place cheapest_replica(const Assignment& a, int expert, Spare&& spare) {
  const Problem& p = a.problem();
  Place best;
  std::int64_t least = 0;
  for (int v = 0; v < p.experts; ++v) {
    if (v == expert || a.replicas(v) < 2 || !spare(v)) continue;
    const std::int64_t share = a.share(v, a.replicas(v) - 1);
    if (best.rank >= 0 && share >= least) continue;
    int lightest = -1;
    for (int r = 0; r < p.ranks; ++r) {
      if (!a.holds(r, v) || a.holds(r, expert)) continue;
      if (lightest < 0 || a.load(r) < a.load(lightest)) lightest = r;
    }
    if (lightest >= 0) best = {lightest, v}, least = share;
  }
  return best;
}

// One more replica of an expert, in an empty slot or in place of a spare one.
template <class Spare>
bool add_replica(Assignment& a, int expert, Spare&& spare) {
  int rank = lightest_for(a, expert);
  if (rank < 0) {
    const Place place = cheapest_replica(a, expert, spare);
    if (place.rank < 0) return false;
    a.remove(place.rank, place.expert);
    rank = place.rank;
  }
  a.add(rank, expert);
  return true;
}

// A replica of `expert` that is on `from` exchanged for an expert of another host with fewer of its
// replicas, of nearly the same share; returns whether there is one.
bool spread_from(Assignment& a, int from, int expert) {
  const Problem& p = a.problem();
  int best = -1, best_other = kEmpty;
  std::int64_t nearest = 0;
  for (int r = 0; r < p.ranks; ++r) {
    const int here = a.replicas_on_host_of(from, expert);
    if (a.holds(r, expert) || a.replicas_on_host_of(r, expert) + 1 >= here) continue;
    for (const int other : a.experts_of(r)) {
      if (!a.may_move(r, from, other)) continue;
      const std::int64_t apart = std::abs(a.share(other) - a.share(expert));
      if (best < 0 || apart < nearest) best = r, best_other = other, nearest = apart;
    }
  }
  if (best < 0) return false;
  a.move(from, best, expert);
  a.move(best, from, best_other);
  return true;
}

// Evens out how many replicas of each expert hosts hold, where the last ones found no room.
void spread_over_hosts(Assignment& a) {
  const Problem& p = a.problem();
  for (int r = 0; r < p.ranks && p.several_hosts(); ++r) {
    const auto experts = a.experts_of(r);
    for (const int e : experts) {
      if (a.replicas(e) > 1 && a.holds(r, e)) spread_from(a, r, e);
    }
  }
}

}  // namespace

void exchange_replicas(Assignment& a) {
  const Problem& p = a.problem();
  auto wanted = share_out(p, distinct_slots(p), p.used_ranks);
  const auto is_spare = [&](int v) { return a.replicas(v) > wanted[at(v)]; };
  for (int moves = a.moves(); moves < p.max_moves; moves = a.moves()) {
    if (a.busiest_load() <= p.mean + p.slack) return;
    int next = -1;
    for (int e = 0; e < p.experts; ++e) {
      if (a.replicas(e) >= wanted[at(e)] || a.share(e) <= p.mean / 4) continue;
      if (next < 0 || a.share(e) > a.share(next)) next = e;
    }
    if (next < 0) return;
    if (!add_replica(a, next, is_spare)) wanted[at(next)] = 0;
  }
}

Assignment start_from_current(const Problem& p) {
  Assignment a(p);
  for (int s = 0; s < p.ranks * p.slots; ++s) {
    const int rank = s / p.slots, expert = p.current[at(s)];
    const bool usable = s % p.slots < p.room[at(rank)] && expert != kEmpty;
    if (usable) a.add(rank, expert);
  }
  for (const int e : largest_first(a)) {
    if (a.replicas(e) > 0) continue;
    // There is a spare replica: the slots are at least as many as the experts.
    XD_CHECK(add_replica(a, e, [](int) { return true; }));
  }
  return a;
}

Assignment start_from_scratch(const Problem& p) {
  Assignment a(p);
  const auto replicas = share_out(p, distinct_slots(p), p.used_ranks);
  a.expect(replicas);
  for (const int e : largest_first(a)) {
    for (int i = 0; i < replicas[at(e)]; ++i) {
      const int rank = lightest_for(a, e);
      if (rank >= 0) {
        a.add(rank, e);
      } else if (!make_way(a, e)) {
        break;  // of ranks with unequal room
      }
    }
  }
  a.count();
  spread_over_hosts(a);
  return a;
}

Assignment start_as_published(const Problem& p) {
  Assignment a(p);
  const int usable = std::accumulate(p.room.begin(), p.room.end(), 0);
  const auto replicas = share_out(p, usable, usable);
  a.expect(replicas);
  for (const int e : largest_first(a)) {
    for (int i = 0; i < replicas[at(e)]; ++i) {
      int lightest = -1;
      for (int r = 0; r < p.ranks; ++r) {
        if (a.has_room(r) && (lightest < 0 || a.load(r) < a.load(lightest))) lightest = r;
      }
      a.add(lightest, e);
    }
  }
  a.count();
  return a;
}

}  // namespace xd::ep
