/* The part of frozen.h, which includes it, that belongs to placement.h. */
#ifndef CROSSDOCK_TESTS_ABI_FROZEN_PLACEMENT_H_
#define CROSSDOCK_TESTS_ABI_FROZEN_PLACEMENT_H_

FROZEN_SIZE(xd_ep_placement, 32);
FROZEN_FIELD(xd_ep_placement, struct_size, 0);
FROZEN_FIELD(xd_ep_placement, expert_of_slot, 8);
FROZEN_FIELD(xd_ep_placement, choice_first, 16);
FROZEN_FIELD(xd_ep_placement, choice_slots, 24);

FROZEN_SIZE(xd_ep_planner_args, 64);
FROZEN_FIELD(xd_ep_planner_args, struct_size, 0);
FROZEN_FIELD(xd_ep_planner_args, num_ranks, 8);
FROZEN_FIELD(xd_ep_planner_args, num_logical_experts, 12);
FROZEN_FIELD(xd_ep_planner_args, slots_per_rank, 16);
FROZEN_FIELD(xd_ep_planner_args, good_enough_permille, 20);
FROZEN_FIELD(xd_ep_planner_args, loads, 24);
FROZEN_FIELD(xd_ep_planner_args, rank_slots, 32);
FROZEN_FIELD(xd_ep_planner_args, rank_hosts, 40);
FROZEN_FIELD(xd_ep_planner_args, current, 48);
FROZEN_FIELD(xd_ep_planner_args, max_moves, 56);

FROZEN_SIZE(xd_ep_placement_info, 40);
FROZEN_FIELD(xd_ep_placement_info, struct_size, 0);
FROZEN_FIELD(xd_ep_placement_info, busiest_rank, 8);
FROZEN_FIELD(xd_ep_placement_info, busiest_host, 16);
FROZEN_FIELD(xd_ep_placement_info, busiest_rank_before, 24);
FROZEN_FIELD(xd_ep_placement_info, moves, 32);
FROZEN_FIELD(xd_ep_placement_info, doubles, 36);

FROZEN_SIZE(xd_ep_move, 12);
FROZEN_FIELD(xd_ep_move, expert, 0);
FROZEN_FIELD(xd_ep_move, from_slot, 4);
FROZEN_FIELD(xd_ep_move, to_slot, 8);

#endif /* CROSSDOCK_TESTS_ABI_FROZEN_PLACEMENT_H_ */
