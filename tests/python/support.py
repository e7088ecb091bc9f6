"""Runs a function on several ranks: as processes that are kept for the next test, or as threads.

A function for ranks is a module-level function ``fn(me: Rank, *args)``; what it returns comes back
as a list, one item per rank. A rank that raises, dies or hangs fails the call with every rank's
traceback.
"""

from __future__ import annotations

import atexit
import dataclasses
import multiprocessing
import multiprocessing.connection
import os
import socket
import threading
import time
import traceback
from collections.abc import Callable
from typing import Any

import crossdock
import torch_defaults
from crossdock import _core

GRACE_SECONDS = 10  # from the first rank's failure until the other ranks are given up


@dataclasses.dataclass(frozen=True)
class Rank:
    """What a rank's function knows about its place."""

    rank: int
    num_ranks: int
    unique_id: bytes  # a meeting point for one communicator of these ranks

    def comm(self, **options: Any) -> crossdock.Comm:
        """This rank's communicator, on the CPU unless `options` say otherwise."""
        return crossdock.Comm(self.unique_id, rank=self.rank, num_ranks=self.num_ranks, **options)

    def raw_comm(self, **options: Any) -> _core.Comm:
        """The same of the raw layer."""
        return _core.Comm(bootstrap="unique_id", rank=self.rank, num_ranks=self.num_ranks,
                          unique_id=self.unique_id, **options)


class RankFailure(AssertionError):
    """Some rank failed; the text has every rank's traceback.

    Attributes:
        errors: per rank the exception, or None: the rank was fine, died, or hung.
    """

    def __init__(self, text: str, errors: list[BaseException | None]) -> None:
        super().__init__(text)
        self.errors = errors


def run_ranks(num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60,
              fresh: bool = False) -> list[Any]:
    """Runs ``fn(Rank, *args)`` in `num_ranks` processes and returns their results.

    The processes have torchrun's environment variables and serve later calls too; with `fresh` they
    are new and end with this call. On a failure all of them are killed.
    """
    pool = None if fresh else _pools.pop(num_ranks, None)
    if pool is None or not pool.alive():
        pool = _Pool(num_ranks)
    try:
        results = pool.run(fn, args, timeout)
    except BaseException:
        pool.kill()
        raise
    if fresh:
        pool.kill()
    else:
        _pools[num_ranks] = pool
    return results


def run_threads(num_ranks: int, fn: Callable[..., Any], *args: Any,
                timeout: float = 60) -> list[Any]:
    """Runs ``fn(Rank, *args)`` in `num_ranks` threads of this process and returns their results."""
    unique_id = _core.unique_id()
    outcomes: list[Any] = [None] * num_ranks

    def serve(rank: int) -> None:
        torch_defaults.apply(alone=False)
        outcomes[rank] = _outcome(fn, Rank(rank, num_ranks, unique_id), args)

    threads = [threading.Thread(target=serve, args=(rank,), daemon=True)
               for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    return _results(outcomes, ["hung"] * num_ranks)


def free_port() -> int:
    """A TCP port of this host that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


# Pools by their number of ranks, while no call uses them.
_pools: dict[int, _Pool] = {}


@atexit.register
def _kill_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


class _Pool:
    """Processes that run one function after another."""

    def __init__(self, num_ranks: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._processes = []
        self._pipes = []
        for rank in range(num_ranks):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(rank, num_ranks, theirs), daemon=True)
            process.start()
            theirs.close()
            self._processes.append(process)
            self._pipes.append(ours)

    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()

    def run(self, fn: Callable[..., Any], args: tuple[Any, ...], timeout: float) -> list[Any]:
        unique_id, port = _core.unique_id(), free_port()
        for pipe in self._pipes:
            pipe.send((fn, args, unique_id, port))
        outcomes: list[Any] = [None] * len(self._pipes)
        lost = ["hung"] * len(self._pipes)
        waiting = dict(enumerate(self._pipes))
        deadline = time.monotonic() + timeout
        while waiting and time.monotonic() < deadline:
            ready = multiprocessing.connection.wait(
                waiting.values(), timeout=deadline - time.monotonic())
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                failed = True
                try:
                    outcomes[rank] = waiting.pop(rank).recv()
                    failed = outcomes[rank][0] == "raised"
                except (EOFError, ConnectionResetError):
                    self._processes[rank].join()
                    lost[rank] = f"died with exit code {self._processes[rank].exitcode}"
                if failed:
                    deadline = min(deadline, time.monotonic() + GRACE_SECONDS)
        return _results(outcomes, lost)


def _serve(rank: int, num_ranks: int, pipe: multiprocessing.connection.Connection) -> None:
    torch_defaults.apply()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(num_ranks), LOCAL_RANK=str(rank),
                      LOCAL_WORLD_SIZE=str(num_ranks), MASTER_ADDR="127.0.0.1")
    while True:
        try:
            fn, args, unique_id, port = pipe.recv()
        except EOFError:
            return
        os.environ["MASTER_PORT"] = str(port)
        outcome = _outcome(fn, Rank(rank, num_ranks, unique_id), args)
        try:
            pipe.send(outcome)
        except Exception:  # what it returned, or raised, cannot be pickled
            text = outcome[2] if outcome[0] == "raised" else traceback.format_exc()
            pipe.send(("raised", None, text))


def _outcome(fn: Callable[..., Any], me: Rank, args: tuple[Any, ...]) -> tuple[Any, ...]:
    try:
        return ("returned", fn(me, *args))
    except BaseException as error:  # SystemExit and pytest's outcomes are failures of the rank, too
        text = traceback.format_exc()
        return ("raised", error.with_traceback(None), text)


def _results(outcomes: list[Any], lost: list[str]) -> list[Any]:
    if all(outcome is not None and outcome[0] == "returned" for outcome in outcomes):
        return [outcome[1] for outcome in outcomes]
    texts, errors = [], []
    for rank, outcome in enumerate(outcomes):
        raised = outcome is not None and outcome[0] == "raised"
        errors.append(outcome[1] if raised else None)
        if outcome is None:
            texts.append(f"rank {rank} {lost[rank]}")
        elif raised:
            texts.append(f"rank {rank} raised:\n{outcome[2]}")
    raise RankFailure("\n".join(texts), errors)
