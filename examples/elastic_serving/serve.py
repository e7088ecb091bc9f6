#!/usr/bin/env python3
"""One of four ranks that decode with a mixture-of-experts layer, one of which is killed.

    crossdock-run -n 4 --respawn 3 -- python serve.py --folder FOLDER
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

import numpy as np

import crossdock
from crossdock.errors import PeerLost
from model import EXPERTS, GATES, HIDDEN, TOPK, Requests, expert, save_checkpoint
from timeline import Log

RANKS, SLOTS = 4, 2 * EXPERTS // 4
# Rank r has its own experts, and as replicas those of the next rank.
PLACEMENT = (np.arange(RANKS)[:, None] * EXPERTS // RANKS + np.arange(SLOTS)) % EXPERTS
LONGEST_WAIT = 20  # seconds for a peer in an operation


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

    def follow(self, view: crossdock.View) -> None:
        """Goes on with the members of a view, and with the replicas that these have."""
        rank = self.group.comm.rank
        for other in set(range(RANKS)) - {rank}:
            self.group.mask_set(other, other not in view.members)
        self.group.reset()
        table = np.full_like(PLACEMENT, -1)
        members = list(view.members)
        table[members] = PLACEMENT[members]
        self.group.set_placement(table)

    def decode(self, tokens: np.ndarray, experts: np.ndarray) -> tuple[np.ndarray, bool]:
        """The layer's outputs, and whether they have the shares of all ranks."""
        slots, out = self.group.slots(), np.empty_like(tokens)
        weights = np.tile(GATES, (len(tokens), 1))
        ok = is_whole(self.group.dispatch, tokens, experts, weights, out=slots)
        for slot, count in enumerate(slots.counts):
            rows = slots.tokens[slot, :count]
            rows[:] = expert(rows, self._up[slot], self._down[slot])
        return out, is_whole(self.group.combine, slots.plan, slots.tokens, out=out) and ok


def is_whole(operation: Callable[..., object], *given: object, out: object) -> bool:
    """Whether an operation has met no loss of a rank; its results are in ``out`` in any case.

    This rank goes on with the step: others may have met none, and wait for it in the next one.
    """
    try:
        operation(*given, out=out)
    except PeerLost as error:
        if error.fatal:
            raise
        return False
    return True


def serve(comm: crossdock.Comm, server: Server, requests: Requests, options, log: Log) -> None:
    """Decodes step by step. Before the next step all ranks agree on who has made this one."""
    step, last, together = 0, None, True
    view = comm.view
    if view.members == (comm.rank,):  # this process has joined, and waits to be taken in
        server.follow(view)  # alone
        server.decode(*requests.batch(step, options.tokens)[:2])
        view = comm.agree(timeout=options.patience)
        step, last, together = view.last_step + view.all_ok, view.last_step + options.steps, False
    while step != last:
        begin, ok = time.monotonic(), True
        try:
            if not together:
                server.follow(view)
            tokens, experts, expected = requests.batch(step, options.tokens)
            out, ok = server.decode(tokens, experts)
            if ok and not np.array_equal(out, expected):
                raise AssertionError(f"rank {comm.rank}, step {step}: expected the exact outputs")
        except PeerLost as error:
            if error.fatal:
                raise
            ok = False  # a further loss
        # Where the share of a rank is missing, all make this step again.
        view = comm.agree(step=step, ok=ok, timeout=options.patience)
        if view.gone:
            log.mark("agreed")
        if view.joined:
            log.mark("activated")
            last = view.last_step + options.steps
        if view.gone or view.joined:
            write_invitation(comm, view, options.folder)
        together = view.all_ok and not view.gone and not view.joined
        if view.all_ok:
            step += 1
            log.count(options.tokens, len(view.members))
            time.sleep(max(0, begin + options.step_ms / 1000 - time.monotonic()))
        else:
            log.mark("made again")


def write_invitation(comm: crossdock.Comm, view: crossdock.View, folder: pathlib.Path) -> None:
    """Leaves for a process that is started later what it needs for joining."""
    if comm.rank == min(view.members):
        partial = folder / "invitation.partial"
        partial.touch(0o600)
        partial.write_bytes(comm.invite())
        os.replace(partial, folder / "invitation")


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
    parser.add_argument("--kill-rank", type=int, default=2, help="its first process (2)")
    parser.add_argument("--kill-after", type=float, default=3, help="seconds (3)")
    parser.add_argument("--steps", type=int, default=600, help="when all are back (600)")
    parser.add_argument("--patience", type=float, default=45, help="seconds for views (45)")
    options = parser.parse_args()
    rank, times = int(os.environ["RANK"]), int(os.environ["XD_RUN_RESPAWNED"])
    options.folder.mkdir(parents=True, exist_ok=True)
    if times == 0:
        for old in options.folder.glob(f"rank-{rank}-*.jsonl"):
            old.unlink()
    log = Log(options.folder / f"rank-{rank}-{times}.jsonl")
    log.mark("started")
    checkpoint = options.folder / "checkpoint.npz"
    if times > 0:
        invitation = (options.folder / "invitation").read_bytes()
        comm = crossdock.Comm.join(invitation, rank=rank, timeout=options.patience)
        log.mark("joined")
    else:
        if rank == 0:
            save_checkpoint(checkpoint)
        comm = crossdock.Comm.from_environment(
            on_peer_loss="mask", elastic=True, timeout=options.patience
        )
        write_invitation(comm, comm.view, options.folder)
    with comm:
        try:
            server = Server(comm, checkpoint, options.tokens)
            requests = Requests(checkpoint, rank)
            if times == 0:
                server.group.set_placement(PLACEMENT)
                if rank == options.kill_rank:
                    threading.Timer(options.kill_after, kill_this_process, [log]).start()
            serve(comm, server, requests, options, log)
            log.close()
        except PeerLost:  # the others have gone on without this rank: start again
            raise
        except BaseException:  # a mistake is no lost rank
            comm.abort()
            raise


if __name__ == "__main__":
    main()
