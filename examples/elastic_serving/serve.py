#!/usr/bin/env python3
"""One of four ranks that decode with a mixture-of-experts layer, one of which is killed.

    OMP_NUM_THREADS=1 crossdock-run -n 4 --respawn 3 -- python serve.py --folder FOLDER
    python timeline.py FOLDER                # what happened when, and tokens per second

Every expert is on two ranks, so the others go on with all experts. The launcher starts the killed
rank again; the new process joins, reads its weights, and is taken in. Each output of each step is
compared with its exact value. A rank ends when all have worked together again for a while.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import signal
import threading
import time
from collections.abc import Callable
from functools import partial

import numpy as np

import crossdock
from crossdock.errors import PeerLost
from model import EXPERTS, GATES, HIDDEN, TOPK, Requests, expert, save_checkpoint
from timeline import RANKS, Log

SLOTS = 2 * EXPERTS // RANKS
# Rank r has its own experts, and as replicas those of the next rank.
PLACEMENT = (np.arange(RANKS)[:, None] * EXPERTS // RANKS + np.arange(SLOTS)) % EXPERTS
# Seconds: for a peer in an operation; for those that meet, or let one in; until the place is taken.
LONGEST_WAIT, LONGEST_MEETING, LONGEST_LOSS = 20, 60, 120


class Server:
    """This rank's part of the layer."""

    def __init__(self, comm: crossdock.Comm, checkpoint: pathlib.Path, tokens: int) -> None:
        config = crossdock.LowLatencyConfig(
            num_experts=RANKS * SLOTS,
            num_logical_experts=EXPERTS,
            max_topk=TOPK,
            max_tokens_per_rank=tokens,
            hidden=HIDDEN,
            dtype="float32",
            on_peer_loss="mask",
            wait_timeout_ms=LONGEST_WAIT * 1000,
        )
        self.group = crossdock.LowLatencyGroup(comm, config)
        weights, mine = np.load(checkpoint), PLACEMENT[comm.rank]
        self._up, self._down = weights["up"][mine], weights["down"][mine]

    def follow(self, view: crossdock.View) -> bool:
        """Goes on with the members of a view, and their replicas. False: one more is lost."""
        rank = self.group.comm.rank
        for other in set(range(RANKS)) - {rank}:
            self.group.mask_set(other, other not in view.members)
        ok = is_whole(self.group.reset)
        table = np.full_like(PLACEMENT, -1)
        members = list(view.members)
        table[members] = PLACEMENT[members]
        self.group.set_placement(table)
        return ok

    def decode(
        self, tokens: np.ndarray, experts: np.ndarray, between: Callable[[], None] = lambda: None
    ) -> tuple[np.ndarray, bool]:
        """The layer's outputs, and whether they have the shares of all ranks."""
        slots, out = self.group.slots(), np.empty_like(tokens)
        weights = np.tile(GATES, (len(tokens), 1))
        ok = is_whole(self.group.dispatch, tokens, experts, weights, out=slots)
        for slot, count in enumerate(slots.counts):
            rows = slots.tokens[slot, :count]
            rows[:] = expert(rows, self._up[slot], self._down[slot])
        between()
        return out, is_whole(self.group.combine, slots.plan, slots.tokens, out=out) and ok


def is_whole(operation: Callable[..., object], *given: object, **out: object) -> bool:
    """Whether an operation has met no loss of a rank; its results are in ``out`` in any case.

    This rank goes on with the step: others may have met none, and wait for it in the next one.
    """
    try:
        operation(*given, **out)
    except PeerLost as error:
        if error.fatal:
            raise
        return False
    return True


def serve(comm: crossdock.Comm, server: Server, requests: Requests, options, log: Log) -> None:
    """Decodes step by step. Before the next step all ranks agree on who has made this one."""
    step, last, together, view = 0, None, True, comm.view
    if view.members == (comm.rank,):  # this process has joined, and waits to be taken in
        server.follow(view)  # alone
        server.decode(*requests.batch(step, options.tokens)[:2])
        view = comm.agree()
        write_invitation(comm, view, options.folder)
        step, last, together = view.last_step + view.all_ok, view.last_step + options.steps, False
    deadline = time.monotonic() + options.kill_after + LONGEST_LOSS
    while step != last:
        if last is None and time.monotonic() > deadline:
            raise TimeoutError(f"rank {comm.rank}, step {step}: expected a loss and a new process")
        begin, between = time.monotonic(), lambda: None
        if options.dies and step == options.kill_step:
            # Its dispatch reaches all but the highest rank, which alone meets the loss there.
            server.group.mask_set(max(set(range(RANKS)) - {comm.rank}), True)
            between = partial(kill_this_process, log)
        ok = together or server.follow(view)
        tokens, experts, expected = requests.batch(step, options.tokens)
        out, whole = server.decode(tokens, experts, between)
        if ok and whole and not np.array_equal(out, expected):
            raise AssertionError(f"rank {comm.rank}, step {step}: expected the exact outputs")
        # Where the share of a rank is missing, all make this step again.
        view = comm.agree(step=step, ok=ok and whole)
        if view.gone:
            log.mark("agreed")
        if view.joined:
            log.mark("activated")
            last = view.last_step + options.steps
        if view.gone or view.joined:
            write_invitation(comm, view, options.folder)
        together = view.all_ok and not view.gone and not view.joined
        if view.all_ok:
            log.count(step, options.tokens, len(view.members))
            step += 1
            time.sleep(max(0, begin + options.step_ms / 1000 - time.monotonic()))
        else:
            log.mark("made again")


def write_invitation(comm: crossdock.Comm, view: crossdock.View, folder: pathlib.Path) -> None:
    """Leaves for a process that is started later what it needs for joining."""
    if comm.rank == min(view.members):
        new = folder / f"invitation.{comm.rank}.partial"
        new.touch(0o600)
        new.write_bytes(comm.invite())
        os.replace(new, folder / "invitation")


def kill_this_process(log: Log) -> None:
    """As anything might, at any moment."""
    log.mark("killed")
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> None:
    """The life of one process."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n", maxsplit=1)[0])
    parser.add_argument("--folder", type=pathlib.Path, required=True)
    parser.add_argument("--tokens", type=int, default=32, help="of a rank in a step (32)")
    parser.add_argument("--step-ms", type=float, default=5, help="a step takes at least (5)")
    kill = parser.add_mutually_exclusive_group()
    parser.add_argument("--kill-rank", type=int, choices=range(RANKS), default=2)
    kill.add_argument("--kill-after", type=float, default=3, help="seconds, wherever it is (3)")
    kill.add_argument("--kill-step", type=int, help="instead: in this step, before its combine")
    parser.add_argument("--steps", type=int, default=600, help="when all are back (600)")
    options = parser.parse_args()
    rank, times = int(os.environ["RANK"]), int(os.environ["XD_RUN_RESPAWNED"])
    checkpoint, invitation = options.folder / "checkpoint.npz", options.folder / "invitation"
    options.folder.mkdir(parents=True, exist_ok=True)
    if times == 0:
        for old in options.folder.glob(f"rank-{rank}-*.jsonl"):
            old.unlink()
    log = Log(options.folder / f"rank-{rank}-{times}.jsonl", options)
    log.mark("runs")
    options.dies = times == 0 and rank == options.kill_rank
    if times > 0:
        if not invitation.exists():
            raise SystemExit(f"{invitation}: expected an invitation; a rank failed before they met")
        comm = crossdock.Comm.join(invitation.read_bytes(), rank=rank, timeout=LONGEST_MEETING)
        log.mark("joined")
    else:
        if rank == 0:
            invitation.unlink(missing_ok=True)  # of an earlier run
            save_checkpoint(checkpoint)
        how = {"on_peer_loss": "mask", "elastic": True, "timeout": LONGEST_MEETING}
        comm = crossdock.Comm.from_environment(**how)
        write_invitation(comm, comm.view, options.folder)
    with comm:
        try:
            server, requests = Server(comm, checkpoint, options.tokens), Requests(checkpoint, rank)
            if times == 0:
                server.group.set_placement(PLACEMENT)
            if options.dies and options.kill_step is None:
                timer = threading.Timer(options.kill_after, kill_this_process, [log])
                timer.daemon = True  # this process may fail before
                timer.start()
            serve(comm, server, requests, options, log)
            log.mark("done")
        except PeerLost:  # the others have gone on without this rank: start again
            raise
        except BaseException:  # a mistake is no lost rank
            comm.abort()
            raise


if __name__ == "__main__":
    main()
