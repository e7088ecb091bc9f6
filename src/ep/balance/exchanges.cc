#include "ep/balance/exchanges.h"

#include <algorithm>
#include <optional>

namespace xd::ep {

namespace {

struct Item {
  std::int64_t share;
  int expert;  // kEmpty: an empty slot
  auto operator<=>(const Item&) const = default;
};

class Evening {
 public:
  Evening(Assignment& assignment, std::int64_t least_gain)
      : a_(assignment), least_gain_(least_gain), items_(at(assignment.problem().ranks)) {
    for (int r = 0; r < p_.ranks; ++r) sort(r);
    moves_ = a_.moves();
  }

  // Makes the best exchange of the busiest rank; returns whether there is one.
  bool step() {
    const int busiest = a_.busiest();
    std::optional<Exchange> best;
    for (int r = 0; r < p_.ranks; ++r) {
      if (r == busiest || p_.room[at(r)] == 0) continue;
      look(busiest, r, best);
    }
    if (!best) return false;
    swap(*best, busiest);
    return true;
  }

 private:
  struct Exchange {
    std::int64_t busier;  // the larger load of the two ranks afterwards
    int rank;
    int given, taken;  // by the busiest rank
  };

  void sort(int rank) {
    auto& items = items_[at(rank)];
    items.clear();
    for (const int e : a_.experts_of(rank)) items.push_back({a_.share(e), e});
    if (a_.has_room(rank)) items.push_back({0, kEmpty});
    std::ranges::sort(items);
  }

  // Two pointers over both ranks' sorted items: with larger items of one go larger ones of the
  // other. The best partner would leave both ranks equally busy; its nearest neighbours that may
  // come are tried.
  void look(int busiest, int rank, std::optional<Exchange>& best) const {
    const std::int64_t half = (a_.load(busiest) - a_.load(rank)) / 2;
    if (half <= 0) return;
    const auto& others = items_[at(rank)];
    std::size_t near = 0;
    for (const Item& item : items_[at(busiest)]) {
      while (near < others.size() && others[near].share < item.share - half) ++near;
      if (item.expert == kEmpty) continue;
      for (std::size_t i = near; i < others.size(); ++i) {
        if (consider(busiest, rank, item, others[i], best)) break;
      }
      for (std::size_t i = near; i-- > 0;) {
        if (consider(busiest, rank, item, others[i], best)) break;
      }
    }
  }

  // Returns false where the next neighbour is to be tried.
  bool consider(int busiest, int rank, const Item& given, const Item& taken,
                std::optional<Exchange>& best) const {
    const std::int64_t less = given.share - taken.share;
    const std::int64_t busier = std::max(a_.load(busiest) - less, a_.load(rank) + less);
    const std::int64_t limit = best ? best->busier - 1 : a_.load(busiest) - least_gain_;
    if (busier > limit) return true;  // neighbours further away are worse
    if (!may_go(busiest, rank, given.expert) || !may_go(rank, busiest, taken.expert)) return false;
    if (moves_ + added_moves(busiest, rank, given.expert, taken.expert) > p_.max_moves) {
      return false;
    }
    best = Exchange{busier, rank, given.expert, taken.expert};
    return true;
  }

  bool may_go(int from, int to, int expert) const {
    return expert == kEmpty || a_.may_move(from, to, expert);
  }

  int is_new(int rank, int expert) const {
    return expert != kEmpty && !p_.held_before(rank, expert) ? 1 : 0;
  }
  int added_moves(int busiest, int rank, int given, int taken) const {
    if (!p_.has_current()) return 0;
    return is_new(rank, given) - is_new(busiest, given) + is_new(busiest, taken) -
           is_new(rank, taken);
  }

  void swap(const Exchange& exchange, int busiest) {
    moves_ += added_moves(busiest, exchange.rank, exchange.given, exchange.taken);
    a_.move(busiest, exchange.rank, exchange.given);
    if (exchange.taken != kEmpty) a_.move(exchange.rank, busiest, exchange.taken);
    sort(busiest);
    sort(exchange.rank);
  }

  Assignment& a_;
  const Problem& p_ = a_.problem();
  std::int64_t least_gain_;
  std::vector<std::vector<Item>> items_;  // of each rank, by ascending share
  int moves_ = 0;
};

}  // namespace

void even_out(Assignment& assignment, std::int64_t enough, std::int64_t least_gain) {
  Evening evening(assignment, least_gain);
  // Each exchange takes least_gain from the busiest rank, so there is an end; the bound keeps it
  // near where ranks are many and gains small.
  for (int left = 64 + 16 * assignment.problem().ranks; left > 0; --left) {
    if (assignment.busiest_load() <= enough || !evening.step()) return;
  }
}

}  // namespace xd::ep
