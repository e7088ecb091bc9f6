#include "ep/balance/problem.h"

#include <algorithm>
#include <numeric>
#include <span>

#include "base/math.h"
#include "base/options.h"

namespace xd::ep {

namespace {

// floor(part / all * kAllLoad), by long division: the product has more than 64 bits.
std::int64_t scaled(std::uint64_t part, std::uint64_t all) {
  std::uint64_t quotient = part / all, rest = part % all;
  for (std::int64_t bit = 1; bit < kAllLoad; bit *= 2) {
    rest *= 2;  // all < 2^62
    quotient = quotient * 2 + (rest >= all ? 1 : 0);
    if (rest >= all) rest -= all;
  }
  return static_cast<std::int64_t>(quotient);
}

std::vector<std::int64_t> read_loads(const std::int64_t* loads, int experts) {
  constexpr std::int64_t limit = std::int64_t{1} << 62;
  XD_REQUIRE(loads != nullptr, "args.loads = NULL, expected a load for each of ", experts,
             " experts");
  std::int64_t sum = 0;
  for (int e = 0; e < experts; ++e) {
    XD_REQUIRE(loads[e] >= 0, "args.loads[", e, "] = ", loads[e], ", expected 0 or more");
    XD_REQUIRE(loads[e] < limit - sum, "args.loads: their sum up to expert ", e,
               " is 2^62 or more, expected less");
    sum += loads[e];
  }
  std::vector<std::int64_t> result(at(experts));
  const std::uint64_t all = sum > 0 ? at(sum) : at(experts);
  for (int e = 0; e < experts; ++e) result[at(e)] = scaled(sum > 0 ? at(loads[e]) : 1, all);
  return result;
}

// A number for each rank, or `otherwise` where none are given.
std::vector<int> read_ranks(const char* name, const std::int32_t* given, int ranks, int most,
                            int otherwise) {
  std::vector<int> result(at(ranks), otherwise);
  for (int r = 0; given != nullptr && r < ranks; ++r) {
    XD_REQUIRE(given[r] >= 0 && given[r] <= most, "args.", name, "[", r, "] = ", given[r],
               ", expected 0 to ", most);
    result[at(r)] = given[r];
  }
  return result;
}

void read_current(Problem& p, const std::int32_t* current) {
  if (current == nullptr) return;
  const std::span table(current, at(p.ranks) * at(p.slots));
  p.current.assign(table.begin(), table.end());
  p.held.resize(at(p.ranks) * at(p.experts));
  for (int s = 0; s < p.ranks * p.slots; ++s) {
    const std::int32_t expert = p.current[at(s)];
    XD_REQUIRE(expert >= kEmpty && expert < p.experts, "args.current[", s, "] = ", expert,
               ", expected -1 to ", p.experts - 1);
    const int rank = s / p.slots;
    const bool usable = s % p.slots < p.room[at(rank)];
    if (usable && expert != kEmpty) p.held[at(rank) * at(p.experts) + at(expert)] = true;
  }
}

}  // namespace

bool Problem::several_hosts() const {
  return std::ranges::any_of(hosts, [&](int host) { return host != hosts[0]; });
}

void check_slots(std::int32_t num_ranks, std::int32_t slots_per_rank) {
  XD_REQUIRE(num_ranks >= 1 && num_ranks <= XD_MAX_RANKS, "num_ranks = ", num_ranks,
             ", expected 1 to ", XD_MAX_RANKS);
  const int most = XD_EP_MAX_EXPERTS / num_ranks;
  XD_REQUIRE(slots_per_rank >= 1 && slots_per_rank <= most, "slots_per_rank = ", slots_per_rank,
             ", expected 1 to ", most, " on each of ", num_ranks, " ranks");
}

Problem read_problem(const xd_ep_planner_args* args) {
  const auto a = read_struct<xd_ep_planner_args>("args", args, XD_EP_PLANNER_ARGS_INIT);
  check_slots(a.num_ranks, a.slots_per_rank);
  Problem p;
  p.ranks = a.num_ranks;
  p.slots = a.slots_per_rank;
  p.room = read_ranks("rank_slots", a.rank_slots, p.ranks, p.slots, p.slots);
  p.hosts = read_ranks("rank_hosts", a.rank_hosts, p.ranks, p.ranks - 1, 0);
  const int usable = std::accumulate(p.room.begin(), p.room.end(), 0);
  p.experts = a.num_logical_experts;
  XD_REQUIRE(p.experts >= 1 && p.experts <= usable, "args.num_logical_experts = ", p.experts,
             ", expected 1 to the ", usable, " slots that may be used");
  XD_REQUIRE(a.good_enough_permille == 0 ||
                 (a.good_enough_permille >= 1000 && a.good_enough_permille <= 1000000),
             "args.good_enough_permille = ", a.good_enough_permille,
             ", expected 0 or 1000 to 1000000");
  XD_REQUIRE(a.max_moves >= 0, "args.max_moves = ", a.max_moves, ", expected 0 or more");
  if (a.max_moves > 0) p.max_moves = a.max_moves;
  p.loads = read_loads(a.loads, p.experts);
  read_current(p, a.current);
  p.used_ranks = static_cast<int>(std::ranges::count_if(p.room, [](int n) { return n > 0; }));
  p.mean = kAllLoad / p.used_ranks;
  const int permille = a.good_enough_permille == 0 ? 1010 : a.good_enough_permille;
  p.slack = p.mean / 1000 * (permille - 1000);
  return p;
}

}  // namespace xd::ep
