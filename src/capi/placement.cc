#include <crossdock/placement.h>

#include <algorithm>

#include "capi/boundary.h"
#include "ep/balance/planner.h"

using xd::guarded;
using xd::operate;

xd_status xd_ep_group_set_placement(xd_ep_group* group, const xd_ep_placement* placement,
                                    xd_stream stream) {
  return operate("xd_ep_group_set_placement", group, XD_EP_SET_PLACEMENT,
                 [&](xd::ep::Group& g) { g.set_placement(placement, stream); });
}

xd_status xd_ll_group_set_placement(xd_ll_group* group, const xd_ep_placement* placement,
                                    xd_stream stream) {
  return operate("xd_ll_group_set_placement", group, XD_LL_SET_PLACEMENT,
                 [&](xd::ep::LlGroup& g) { g.set_placement(placement, stream); });
}

xd_status xd_ep_group_loads(xd_ep_group* group, const DLTensor* loads, int32_t clear,
                            xd_stream stream) {
  return operate("xd_ep_group_loads", group, xd::kNoOperation,
                 [&](xd::ep::Group& g) { g.tell_loads(loads, clear, stream); });
}

xd_status xd_ep_plan_placement(const xd_ep_planner_args* args, int32_t* expert_of_slot,
                               xd_ep_placement_info* info) {
  XD_REQUIRE_GIVEN("xd_ep_plan_placement", expert_of_slot);
  return guarded("xd_ep_plan_placement", [&] {
    const auto planned = xd::ep::plan_placement(xd::ep::read_problem(args));
    if (info != nullptr) xd::write_struct("info", info, planned.info);
    std::ranges::copy(planned.expert_of_slot, expert_of_slot);
  });
}

xd_status xd_ep_placement_moves(int32_t num_ranks, int32_t slots_per_rank, const int32_t* from,
                                const int32_t* to, xd_ep_move* moves, int32_t* num_moves) {
  XD_REQUIRE_GIVEN("xd_ep_placement_moves", from);
  XD_REQUIRE_GIVEN("xd_ep_placement_moves", to);
  XD_REQUIRE_GIVEN("xd_ep_placement_moves", moves);
  XD_REQUIRE_GIVEN("xd_ep_placement_moves", num_moves);
  return guarded("xd_ep_placement_moves", [&] {
    xd::ep::check_slots(num_ranks, slots_per_rank);
    const auto found = xd::ep::placement_moves(num_ranks, slots_per_rank, from, to);
    std::ranges::copy(found, moves);
    *num_moves = static_cast<int32_t>(found.size());
  });
}
