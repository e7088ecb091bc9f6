#!/usr/bin/env python3
"""Places experts by their load, and again when it has changed; no ranks are needed for that."""

import numpy as np

import crossdock

EXPERTS, RANKS, SLOTS = 64, 8, 9  # 8 slots more than experts


def main() -> None:
    """Plans twice, and looks at the difference."""
    random = np.random.default_rng(0)
    loads = np.exp(random.standard_normal(EXPERTS))  # rows of each expert, of all ranks

    placement = crossdock.plan_placement(loads, num_ranks=RANKS, slots_per_rank=SLOTS)
    print(f"busiest rank: {placement.busiest_rank:.3f} times the mean")

    # A router that knows replicas: choice [T, K] of experts becomes a choice of slots.
    slots, replicas = placement.slots_of_experts()
    topk_idx = random.integers(-1, EXPERTS, (16, 2))  # -1 = no expert
    token = np.arange(16)[:, None]
    slot_idx = np.where(topk_idx < 0, -1, slots[topk_idx, token % replicas[topk_idx]])
    chosen = topk_idx >= 0
    assert (placement.expert_of_slot.ravel()[slot_idx[chosen]] == topk_idx[chosen]).all()

    loads *= np.exp(0.2 * random.standard_normal(EXPERTS))  # some time later
    later = crossdock.plan_placement(loads, RANKS, SLOTS, current=placement, max_moves=12)
    print(f"{later.busiest_rank_before:.3f} before, {later.busiest_rank:.3f} now", end=", ")
    print(f"{later.moves} of {RANKS * SLOTS} slots moved")
    for move in crossdock.placement_moves(placement, later):
        # Copy the weights of move.expert from slot move.from_slot to slot move.to_slot.
        assert placement.expert_of_slot.ravel()[move.from_slot] == move.expert
    assert later.moves <= 12
    assert later.busiest_rank < later.busiest_rank_before
    print("as expected")


if __name__ == "__main__":
    main()
