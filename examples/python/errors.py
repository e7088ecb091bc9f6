#!/usr/bin/env python3
"""Shows mistakes, and the errors that each rank gets. The ranks are two threads of this process."""

import threading
from collections.abc import Callable

import numpy as np

import crossdock

CONFIG = crossdock.EpConfig(
    num_experts=4, max_topk=2, max_tokens_per_rank=8, hidden=16, dtype="float32", recv_capacity=8
)


def bad_argument(rank: int, group: crossdock.EpGroup) -> None:
    """Rank 0 dispatches float64, which no operation moves."""
    plan = group.prepare(np.zeros((2, 1), np.int64))
    group.dispatch(plan, np.zeros((2, 16), np.float64 if rank == 0 else np.float32))


def overflow(rank: int, group: crossdock.EpGroup) -> None:
    """All 10 tokens choose an expert of rank 0, which can receive 8 rows."""
    group.prepare(np.zeros((5, 1), np.int64))


def left(rank: int, group: crossdock.EpGroup) -> None:
    """Rank 1 leaves, rank 0 still needs it."""
    if rank == 1:
        group.comm.close()
    else:
        group.prepare(np.zeros((1, 1), np.int64))


def describe(step: Callable[[int, crossdock.EpGroup], None], group: crossdock.EpGroup) -> str:
    """The result of a step on this rank."""
    rank = group.comm.rank
    try:
        step(rank, group)
    except crossdock.CrossdockError as error:
        return (
            f"rank {rank}  {type(error).__name__}: {error}\n"
            f"        peer={error.peer} operation={error.operation} fatal={error.fatal}"
        )
    except (TypeError, ValueError) as error:
        return f"rank {rank}  {type(error).__name__}: {error}"
    return f"rank {rank}  no error"


def main() -> None:
    """Prints, step by step, what both ranks heard."""
    meeting = crossdock.unique_id()
    steps = {"bad-argument": bad_argument, "overflow": overflow, "left": left}
    heard: list[list[str]] = [[], []]

    def run_rank(rank: int) -> None:
        comm = crossdock.Comm(meeting, rank=rank, num_ranks=2, timeout=30)
        with crossdock.EpGroup(comm, CONFIG) as group:
            for step in steps.values():
                heard[rank].append(describe(step, group))
        comm.close()

    ranks = [threading.Thread(target=run_rank, args=(rank,)) for rank in range(2)]
    for thread in ranks:
        thread.start()
    for thread in ranks:
        thread.join()
    for name, texts in zip(steps, zip(*heard, strict=True)):
        print(f"=== {name}", *texts, sep="\n")


if __name__ == "__main__":
    main()
