"""Signals that come while Python's main thread waits for peers: Ctrl-C, and handlers in general."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable

import numpy as np
import pytest

import crossdock
from core_support import config_of
from crossdock import launch
from crossdock.errors import Aborted, InvalidArgument
from support import Rank, on_ranks

AFTER = 0.3  # seconds until the signal: by then the call waits
LIMIT = 2.0  # of all: half a second is promised, and the machine may be busy

CONFIG = config_of()
IDS = np.array([[0, 3]], np.int64)


def send_soon(number: int) -> threading.Timer:
    timer = threading.Timer(AFTER, os.kill, (os.getpid(), number))
    timer.start()
    return timer


def interrupted(call: Callable[[], object]) -> None:
    """The call ends with KeyboardInterrupt soon after Ctrl-C."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # jobs in the background ignore it
    since = time.monotonic()
    send_soon(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        call()
    assert AFTER <= time.monotonic() - since < AFTER + LIMIT


CALLS: dict[str, Callable[[crossdock.Comm, crossdock.EpGroup], object]] = {
    "barrier": lambda comm, group: comm.barrier(),
    "grow": lambda comm, group: comm.grow(4096),
    "group": lambda comm, group: crossdock.EpGroup(comm, CONFIG),
    "prepare": lambda comm, group: group.prepare(IDS),
}


@on_ranks(2)
@pytest.mark.parametrize("name", CALLS)
def test_a_wait_ends_with_ctrl_c_and_the_peers_hear_of_it(me: Rank, name: str) -> None:
    with me.comm(timeout=60) as comm:
        group = crossdock.EpGroup(comm, CONFIG)
        if me.rank == 1:
            interrupted(lambda: CALLS[name](comm, group))
        else:
            while comm.error() is None:  # hears of it without any call that waits
                time.sleep(0.01)
        with pytest.raises(Aborted, match="rank 1 called xd_comm_abort, or was interrupted"):
            comm.barrier()


def _interrupt_meetings(me: Rank) -> None:
    interrupted(lambda: me.comm(timeout=60))
    os.environ["MASTER_PORT"] = str(launch.free_port())
    for rank in (0, 1):  # one that serves the meeting, and one that searches it
        os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK="0")
        interrupted(lambda: crossdock.Comm.from_environment(timeout=60))


@on_ranks(2, fresh=True)
def test_ranks_that_wait_for_others_to_come_end_with_ctrl_c(me: Rank) -> None:
    if me.rank == 0:
        _interrupt_meetings(me)


@on_ranks(2)
def test_a_handler_runs_while_a_call_waits_and_cannot_wait_inside_it(me: Rank) -> None:
    """A handler that raises nothing runs while the call waits, and the call goes on."""
    seen: list[object] = []
    with me.comm(timeout=60) as comm:
        group = crossdock.EpGroup(comm, CONFIG)

        def handler(number: int, frame: object) -> None:
            try:
                group.prepare(IDS)
            except InvalidArgument as error:
                seen.append(str(error))

        if me.rank == 1:
            before = signal.signal(signal.SIGUSR1, handler)
            timer = send_soon(signal.SIGUSR1)
            comm.barrier()
            timer.join()
            signal.signal(signal.SIGUSR1, before)
            assert len(seen) == 1 and "called by a signal handler" in seen[0], seen
        else:
            time.sleep(3 * AFTER)
            comm.barrier()
        group.prepare(IDS)
