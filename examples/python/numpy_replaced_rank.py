#!/usr/bin/env python3
"""Decoding over three processes, of which one is killed: the others go on, and get it back."""

import itertools
import multiprocessing
import os
import signal
from collections.abc import Callable

import numpy as np

import crossdock
from crossdock.errors import PeerLost

RANKS, TOKENS, HIDDEN, EXPERTS = 3, 4, 16, 6
DIES, LAST_STEP = 2, 4  # this rank, behind this step
STEPS_TOGETHER = 5  # in the end, with the process that has come


def is_whole(operation: Callable[..., object], *given: object, out: object) -> bool:
    """Whether an operation has met no loss; the step goes on, as others may wait in the next."""
    try:
        operation(*given, out=out)
    except PeerLost as error:
        if error.fatal:
            raise
        return False
    return True


def one_step(group: crossdock.LowLatencyGroup, members: set[int]) -> bool:
    """Each token goes to an expert of each rank; those of members give it back.

    Returns whether the step has met no loss.
    """
    tokens = np.random.default_rng(0).standard_normal((TOKENS, HIDDEN), np.float32)
    topk_idx = np.tile(np.arange(RANKS) * EXPERTS // RANKS, (TOKENS, 1))
    topk_idx[:, [rank not in members for rank in range(RANKS)]] = -1
    slots, out = group.slots(), np.empty_like(tokens)
    ok = is_whole(group.dispatch, tokens, topk_idx, out=slots)
    if not is_whole(group.combine, slots.plan, slots.tokens, out=out) or not ok:
        return False
    np.testing.assert_allclose(out, tokens * len(members), rtol=1e-5)
    return True


def next_view(comm: crossdock.Comm, group: crossdock.LowLatencyGroup) -> set[int]:
    """The members of the next view, with whom the group is in step then."""
    view = comm.agree(timeout=30)
    for rank in set(range(RANKS)) - {comm.rank}:
        group.mask_set(rank, rank not in view.members)
    group.reset()
    return set(view.members)


def serve(comm: crossdock.Comm, invitations: multiprocessing.SimpleQueue) -> None:
    """The part of each rank, also of the one that comes later."""
    config = crossdock.LowLatencyConfig(
        num_experts=EXPERTS,
        max_topk=RANKS,
        max_tokens_per_rank=TOKENS,
        hidden=HIDDEN,
        dtype="float32",
        on_peer_loss="mask",
    )
    with comm, crossdock.LowLatencyGroup(comm, config) as group:
        members = set(comm.view.members)
        if members == {comm.rank}:
            assert one_step(group, members)  # a guest warms up alone
            members = next_view(comm, group)
        else:
            steps_until_a_loss(comm, group)
            members = next_view(comm, group)
            print(f"rank {comm.rank}: goes on with {sorted(members)}", flush=True)
            if comm.rank == min(members):
                invitations.put(comm.invite())
            while len(members) < RANKS:  # a server looks now and then
                assert one_step(group, members)
                members = next_view(comm, group)
        for _ in range(STEPS_TOGETHER):
            assert one_step(group, members)
        print(f"rank {comm.rank}: works with {sorted(members)}", flush=True)


def steps_until_a_loss(comm: crossdock.Comm, group: crossdock.LowLatencyGroup) -> None:
    """Returns when this rank has met the loss of another."""
    for step in itertools.count():
        if not one_step(group, set(range(RANKS))):
            return
        if (comm.rank, step) == (DIES, LAST_STEP):
            os.kill(os.getpid(), signal.SIGKILL)


def first_rank(rank: int, meeting: bytes, invitations: multiprocessing.SimpleQueue) -> None:
    """A process that is there from the beginning."""
    comm = crossdock.Comm(meeting, rank=rank, num_ranks=RANKS, on_peer_loss="mask", elastic=True)
    serve(comm, invitations)


def later_rank(invitation: bytes, invitations: multiprocessing.SimpleQueue) -> None:
    """A process that takes the place of another one."""
    serve(crossdock.Comm.join(invitation), invitations)


def main() -> None:
    """Starts the ranks, and one more when a rank that works asks for it."""
    processes = multiprocessing.get_context("spawn")
    meeting, invitations = crossdock.unique_id(), processes.SimpleQueue()
    ranks = [
        processes.Process(target=first_rank, args=(rank, meeting, invitations))
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    ranks.append(processes.Process(target=later_rank, args=(invitations.get(), invitations)))
    ranks[-1].start()
    for process in ranks:
        process.join()
    expected = [-signal.SIGKILL if rank == DIES else 0 for rank in range(RANKS + 1)]
    if [process.exitcode for process in ranks] != expected:
        raise SystemExit("numpy_replaced_rank.py: expected that only one rank fails")


if __name__ == "__main__":
    main()
