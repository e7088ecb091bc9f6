#!/usr/bin/env python3
"""Decoding steps over three processes that it starts itself, of which one dies on the way."""

import multiprocessing
import os
import signal

import numpy as np

import crossdock
from crossdock.errors import PeerLost

RANKS, STEPS, TOKENS, HIDDEN, EXPERTS = 3, 12, 4, 16, 6
DIES, LAST_STEP = 2, 4  # this rank, behind this step


def despite_losses(operation, *given, out):
    """What the operation gives; the share of a rank that it loses is missing."""
    try:
        operation(*given, out=out)
    except PeerLost as error:
        if error.fatal:
            raise
        print(f"goes on without rank {error.peer}", flush=True)
    return out  # complete, also where the operation has raised


def run_rank(rank: int, meeting: bytes) -> None:
    """The part of each rank."""
    config = crossdock.LowLatencyConfig(
        num_experts=EXPERTS,
        max_topk=RANKS,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
        on_peer_loss="mask",
    )
    with (
        # A rank whose process ends is masked only where the communicator outlives it as well.
        crossdock.Comm(meeting, rank=rank, num_ranks=RANKS, on_peer_loss="mask") as comm,
        crossdock.LowLatencyGroup(comm, config) as group,
    ):
        tokens = np.random.default_rng(rank).standard_normal((TOKENS, HIDDEN), np.float32)
        topk_idx = np.tile(np.arange(RANKS) * EXPERTS // RANKS, (TOKENS, 1))  # one on each rank
        slots, out = group.slots(), np.empty_like(tokens)
        for step in range(STEPS):
            masked = group.mask().sum()
            despite_losses(group.dispatch, tokens, topk_idx, out=slots)
            despite_losses(group.combine, slots.plan, slots.tokens, out=out)
            if masked == group.mask().sum():  # every living rank's expert has returned the token
                np.testing.assert_allclose(out, tokens * (RANKS - masked), rtol=1e-5)
            if (rank, step) == (DIES, LAST_STEP):
                os.kill(os.getpid(), signal.SIGKILL)
        print(f"rank {rank}: {STEPS} steps, mask {group.mask().tolist()}", flush=True)


def main() -> None:
    """Starts the ranks and waits for them."""
    processes = multiprocessing.get_context("spawn")
    meeting = crossdock.unique_id()
    ranks = [processes.Process(target=run_rank, args=(rank, meeting)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    expected = [-signal.SIGKILL if rank == DIES else 0 for rank in range(RANKS)]
    if [process.exitcode for process in ranks] != expected:
        raise SystemExit("numpy_lost_rank.py: expected that only one rank fails")


if __name__ == "__main__":
    main()
