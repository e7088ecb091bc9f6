#include "placement.h"

#include <crossdock/placement.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <tuple>
#include <utility>
#include <vector>

#include "arguments.h"
#include "errors.h"

namespace xdpy {
namespace {

using Numbers = std::vector<std::int32_t>;

Numbers numbers_of(nb::handle given, const char* name, std::int64_t wanted, const char* things) {
  Numbers numbers = integers<std::int32_t>(given, name, "a sequence of integers");
  check_length(name, numbers.size(), wanted, "the numbers of", things);
  return numbers;
}

// A list that may be None, and its address for the library.
class Optional {
 public:
  Optional(nb::handle given, const char* name, std::int64_t wanted, const char* things)
      : is_given_(!given.is_none()) {
    if (is_given_) numbers_ = numbers_of(given, name, wanted, things);
  }
  [[nodiscard]] const std::int32_t* get() const { return is_given_ ? numbers_.data() : nullptr; }

 private:
  bool is_given_;
  Numbers numbers_;
};

std::pair<Numbers, nb::dict> plan_placement(std::int32_t num_experts, std::int32_t num_ranks,
                                            std::int32_t slots_per_rank, nb::handle loads,
                                            nb::handle rank_slots, nb::handle rank_hosts,
                                            nb::handle current, std::int32_t max_moves,
                                            std::int32_t good_enough_permille) {
  const std::int64_t all = std::int64_t{num_ranks} * slots_per_rank;
  const auto load = integers<std::int64_t>(loads, "loads", "a sequence of integers");
  check_length("loads", load.size(), num_experts, "the loads of", "experts");
  const Optional slots(rank_slots, "rank_slots", num_ranks, "ranks");
  const Optional hosts(rank_hosts, "rank_hosts", num_ranks, "ranks");
  const Optional today(current, "current", all, "slots");
  xd_ep_planner_args args XD_EP_PLANNER_ARGS_INIT;
  args.num_ranks = num_ranks;
  args.num_logical_experts = num_experts;
  args.slots_per_rank = slots_per_rank;
  args.good_enough_permille = good_enough_permille;
  args.loads = load.data();
  args.rank_slots = slots.get();
  args.rank_hosts = hosts.get();
  args.current = today.get();
  args.max_moves = max_moves;
  // Sizes that the library refuses need no memory.
  const bool is_sound = num_ranks > 0 && slots_per_rank > 0 && all <= XD_EP_MAX_EXPERTS;
  Numbers table(is_sound ? static_cast<std::size_t>(all) : 1);
  xd_ep_placement_info info XD_EP_PLACEMENT_INFO_INIT;
  check(without_gil([&] { return xd_ep_plan_placement(&args, table.data(), &info); }));
  return {table, fields_of(info)};
}

std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t>> placement_moves(
    std::int32_t num_ranks, std::int32_t slots_per_rank, nb::handle old_table,
    nb::handle new_table) {
  const std::int64_t all = std::int64_t{num_ranks} * slots_per_rank;
  const Numbers from = numbers_of(old_table, "old", all, "slots"),
                to = numbers_of(new_table, "new", all, "slots");
  std::vector<xd_ep_move> moves(from.size() + 1);
  std::int32_t number = 0;
  check(xd_ep_placement_moves(num_ranks, slots_per_rank, from.data(), to.data(), moves.data(),
                              &number));
  std::vector<std::tuple<std::int32_t, std::int32_t, std::int32_t>> found;
  for (std::int32_t i = 0; i < number; ++i) {
    const xd_ep_move& move = moves[static_cast<std::size_t>(i)];
    found.emplace_back(move.expert, move.from_slot, move.to_slot);
  }
  return found;
}

}  // namespace

void bind_placement(nb::module_& module) {
  using namespace nb::literals;
  module.def("plan_placement", &plan_placement, "num_experts"_a, "num_ranks"_a, "slots_per_rank"_a,
             "loads"_a, "rank_slots"_a.none(), "rank_hosts"_a.none(), "current"_a.none(),
             "max_moves"_a, "good_enough_permille"_a);
  module.def("placement_moves", &placement_moves, "num_ranks"_a, "slots_per_rank"_a, "old"_a,
             "new"_a);
}

}  // namespace xdpy
