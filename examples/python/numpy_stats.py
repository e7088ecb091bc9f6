#!/usr/bin/env python3
"""Finds the rank that is always late, among two processes that it starts itself."""

import time

import numpy as np

import crossdock.launch

RANKS, STEPS, TOKENS, LATE = 2, 20, 4, 1


def run_rank(rank: int, meeting: bytes) -> None:
    """The part of each rank."""
    config = crossdock.EpConfig(
        num_experts=RANKS,
        max_topk=1,
        max_tokens_per_rank=TOKENS,
        hidden=4,
        dtype="float32",
    )
    with (
        crossdock.Comm(meeting, rank=rank, num_ranks=RANKS) as comm,
        crossdock.EpGroup(comm, config) as group,
    ):
        group.set_name("layer 3")
        for _ in range(STEPS):
            if rank == LATE:
                time.sleep(0.01)
            group.prepare(np.zeros((TOKENS, 1), np.int64))

        stats = group.stats()
        print(f"rank {rank}: {stats.calls['prepare']} calls of prepare")
        for late, ns in enumerate(stats.wait_ns or ()):
            print(f"rank {rank} waited {ns / 1e9:.1f} s for rank {late}", flush=True)


def main() -> None:
    """Starts the ranks and waits for them."""
    crossdock.launch.run(RANKS, run_rank, crossdock.unique_id())


if __name__ == "__main__":
    main()
