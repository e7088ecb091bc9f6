#!/usr/bin/env python3
"""Experts that move while four ranks serve: counts, a plan, and moves; tokens notice nothing."""

import numpy as np

import crossdock.launch

RANKS, TOKENS, HIDDEN, TOPK = 4, 64, 16, 2
EXPERTS, SLOTS = 16, 5  # each rank has room for 5 experts, one more than its share


def run_rank(rank: int, meeting: bytes) -> None:
    """The part of each rank."""
    config = crossdock.EpConfig(
        num_experts=RANKS * SLOTS,  # slots
        num_logical_experts=EXPERTS,  # ids in topk_idx name these
        max_topk=TOPK,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
    )
    with (
        crossdock.Comm(meeting, rank=rank, num_ranks=RANKS, heap_bytes=1 << 20) as comm,
        crossdock.EpGroup(comm, config) as group,
    ):
        # Each rank begins with its share of the experts, and a slot to spare.
        share = EXPERTS // RANKS
        placement = np.full((RANKS, SLOTS), -1)
        placement[:, :share] = np.arange(EXPERTS).reshape(RANKS, share)
        group.set_placement(placement)
        weights = comm.empty((SLOTS, HIDDEN), np.float32)  # where peers can read them
        weights[:share] = 1 + placement[rank, :share, None]

        random = np.random.default_rng(rank)
        popular = 1 / np.arange(1, EXPERTS + 1)  # expert 0 is chosen most often
        rows = []
        for step in range(6):
            if step == 3:
                loads = group.loads().sum(axis=0)  # equal on all ranks
                new = crossdock.plan_placement(loads, RANKS, SLOTS, current=placement)
                crossdock.move_experts(group, [weights], placement, new)
                placement = new.expert_of_slot
            scores = random.exponential(1 / popular, (TOKENS, EXPERTS))
            topk_idx = scores.argsort(axis=1)[:, :TOPK].copy()
            tokens = random.integers(-4, 5, (TOKENS, HIDDEN)).astype(np.float32)

            plan = group.prepare(topk_idx)
            received = group.dispatch(plan, tokens)
            for slot in range(SLOTS):
                zone = slice(plan.offsets[slot], plan.offsets[slot + 1])
                received.tokens[zone] *= weights[slot]
            out = group.combine(plan, received.tokens)

            expected = tokens * (1 + topk_idx).sum(axis=1, keepdims=True)
            np.testing.assert_array_equal(out, expected)
            rows.append(plan.rank_rows.sum(axis=0).max())  # of the busiest rank
        if rank == 0:
            before, after = sum(rows[:3]), sum(rows[3:])
            print(f"rows of the busiest rank: {before} in 3 steps, {after} in 3 later ones")
            assert after < before
        print(f"rank {rank}: sums as expected", flush=True)


def main() -> None:
    """Starts the ranks and waits for them."""
    crossdock.launch.run(RANKS, run_rank, crossdock.unique_id())


if __name__ == "__main__":
    main()
