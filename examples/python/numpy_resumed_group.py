#!/usr/bin/env python3
"""Steps of dispatch and combine over four processes, of which one is killed: the others go on."""

import multiprocessing
import os
import signal

import numpy as np

import crossdock as xd

RANKS, TOKENS, HIDDEN, EXPERTS, STEPS = 4, 6, 16, 8, 8
DIES, DIES_IN = 2, 3  # this rank, in this step


def one_step(group: xd.EpGroup, step: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each token goes to two experts, which give it back times their number plus one."""
    rank = group.comm.rank
    rng = np.random.default_rng(100 * step + rank)
    topk_idx = np.stack([rng.permutation(EXPERTS)[:2] for _ in range(TOKENS)])
    tokens = rng.integers(-8, 8, (TOKENS, HIDDEN)).astype(np.float32)
    plan = group.prepare(topk_idx)
    if (rank, step) == (DIES, DIES_IN):
        os.kill(os.getpid(), signal.SIGKILL)  # the others wait for it in dispatch
    rows = group.dispatch(plan, tokens).tokens.copy()
    first = rank * EXPERTS // RANKS
    for local, (begin, end) in enumerate(zip(plan.offsets, plan.offsets[1:], strict=False)):
        rows[begin:end] *= first + local + 1
    return topk_idx, tokens, group.combine(plan, rows)


def check(results: tuple[np.ndarray, np.ndarray, np.ndarray], comm: xd.Comm) -> None:
    """Experts of ranks that are gone give nothing."""
    topk_idx, tokens, out = results
    there = np.isin(topk_idx * RANKS // EXPERTS, list(comm.view.members))
    factors = np.where(there, topk_idx + 1, 0).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(out, tokens * factors)


def go_on(group: xd.EpGroup, step: int) -> int:
    """Agrees with those that are left, again while more are lost; the step to make again."""
    while True:
        view = group.comm.agree(step=step, ok=False, timeout=60)
        try:
            group.enter_view()
        except xd.PeerLost:
            continue
        return view.first_step


def run(comm: xd.Comm) -> None:
    """The part of each rank."""
    config = xd.EpConfig(
        num_experts=EXPERTS,
        max_topk=2,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
        on_peer_loss="resume",
    )
    with comm, xd.EpGroup(comm, config) as group:
        step = 0
        while step < STEPS:
            try:
                check(one_step(group, step), comm)
                step += 1
            except xd.PeerLost:
                step = go_on(group, step)
                print(f"rank {comm.rank}: step {step} again with {comm.view.members}", flush=True)
        print(f"rank {comm.rank}: {STEPS} steps are right", flush=True)


def start(meeting: bytes, rank: int) -> None:
    """One process."""
    run(xd.Comm(meeting, rank=rank, num_ranks=RANKS, on_peer_loss="mask"))


def main() -> None:
    """Starts the ranks, and sees that only one of them fails."""
    context = multiprocessing.get_context("spawn")
    meeting = xd.unique_id()
    ranks = [context.Process(target=start, args=(meeting, rank)) for rank in range(RANKS)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    expected = [-signal.SIGKILL if rank == DIES else 0 for rank in range(RANKS)]
    if [process.exitcode for process in ranks] != expected:
        raise SystemExit("numpy_resumed_group.py: expected that only one rank fails")


if __name__ == "__main__":
    main()
