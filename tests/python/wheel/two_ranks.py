"""A program that a user of the installed package might write, on two processes; prints its rows."""

from __future__ import annotations

import sys

import numpy as np

import crossdock
from crossdock import launch


def rank_main(rank: int, unique_id: bytes) -> None:
    config = crossdock.EpConfig(
        num_experts=2, max_topk=1, max_tokens_per_rank=4, hidden=8, dtype="float32"
    )
    with crossdock.Comm(unique_id, rank=rank, num_ranks=2, heap_bytes=1 << 20) as comm:
        with crossdock.EpGroup(comm, config) as group:
            plan = group.prepare(np.array([[0], [1], [1], [-1]]))
            tokens = np.arange(32, dtype=np.float32).reshape(4, 8) + 100 * rank
            received = group.dispatch(plan, tokens)
            out = group.combine(plan, received.tokens * 2)
            tokens[3] = 0  # it had no expert
            if not np.array_equal(out, tokens * 2):
                sys.exit(f"rank {rank}: got {out}, want {tokens * 2}")


def main() -> None:
    launch.run(2, rank_main, crossdock.unique_id(), timeout=60)
    print(f"{crossdock.__file__} {crossdock.__version__}: two ranks got what they should")


if __name__ == "__main__":
    main()
