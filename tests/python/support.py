"""Runs a function on several ranks: as processes that are kept for the next test, or as threads.

A function for ranks is a module-level function ``fn(me: Rank, *args)``; what it returns comes back
as a list, one item per rank. A rank that raises, dies or hangs fails the call with every rank's
traceback.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import inspect
import sys
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

import crossdock
import spread
import torch_defaults
from crossdock import _core, launch

# Limits of time end tests that hang; they are given for a quiet machine.
PATIENCE = 4
GRACE_SECONDS = 10 * PATIENCE  # from the first rank's failure until the other ranks are given up


@dataclasses.dataclass(frozen=True)
class Rank:
    """A rank's place among the ranks, for its function."""

    rank: int
    num_ranks: int
    unique_id: bytes  # a meeting point for one communicator of these ranks

    def comm(self, **options: Any) -> crossdock.Comm:
        """This rank's communicator, on the CPU unless `options` say otherwise."""
        return crossdock.Comm(self.unique_id, rank=self.rank, num_ranks=self.num_ranks, **options)

    def raw_comm(self, **options: Any) -> _core.Comm:
        """The same of the raw layer."""
        return _core.Comm(
            bootstrap="unique_id",
            rank=self.rank,
            num_ranks=self.num_ranks,
            unique_id=self.unique_id,
            **options,
        )


def run_ranks(
    num_ranks: int,
    fn: Callable[..., Any],
    *args: Any,
    timeout: float = 60,
    fresh: bool = False,
    apart: bool = False,
) -> list[Any]:
    """Runs ``fn(Rank, *args)`` in `num_ranks` processes and returns their results.

    The processes have torchrun's environment variables and serve later calls too; with `fresh` they
    are new and end with this call. With `apart` they are on two hosts, as `spread` has them. On a
    failure all of them are killed.
    """
    ranks = None if fresh else _pools.pop((num_ranks, apart), None)
    if ranks is None or not ranks.alive():
        ranks = launch.Ranks(num_ranks)
    task = bytes(ForkingPickler.dumps((fn, args)))
    try:
        place = num_ranks, _core.unique_id(), apart
        results = ranks.run(
            _call, *place, task, fresh, timeout=PATIENCE * timeout, grace=GRACE_SECONDS
        )
    except BaseException:
        ranks.kill()
        raise
    if fresh:
        ranks.kill()
    else:
        _pools[num_ranks, apart] = ranks
    return results


def on_ranks(
    *num_ranks: int, timeout: float = 60, fresh: bool = False
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Makes a function for ranks a test, which `run_ranks` runs: once on each number of ranks.

    The arguments of the function behind its Rank are parameters and fixtures of the test. A call
    with a Rank is the function's own, so that other tests may use it. The test prints the SEED of
    its module, if there is one.
    """

    def decorate(fn: Callable[..., None]) -> Callable[..., None]:
        _, *arguments = inspect.signature(fn).parameters.values()

        @functools.wraps(fn)
        def test(*args: Any, **given: Any) -> None:
            if args:
                return fn(*args, **given)
            ranks = given.pop("num_ranks") if len(num_ranks) > 1 else num_ranks[0]
            if "SEED" in fn.__globals__:
                print(f"seed {fn.__globals__['SEED']}")
            args = tuple(given[argument.name] for argument in arguments)
            run_ranks(ranks, test, *args, timeout=timeout, fresh=fresh)

        wanted = list(arguments)
        if len(num_ranks) > 1:
            wanted.append(inspect.Parameter("num_ranks", inspect.Parameter.POSITIONAL_OR_KEYWORD))
            test = pytest.mark.parametrize("num_ranks", num_ranks)(test)
        del test.__wrapped__  # whose `me` pytest would take for a fixture
        test.__signature__ = inspect.Signature(wanted)
        return test

    return decorate


# Processes by their number of ranks, and whether these are apart, while no call uses them.
_pools: dict[tuple[int, bool], launch.Ranks] = {}
_has_defaults = False


@atexit.register
def _kill_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


def _call(
    rank: int, num_ranks: int, unique_id: bytes, apart: bool, task: bytes, fresh: bool
) -> Any:
    global _has_defaults
    if not _has_defaults:
        if apart:
            spread.declare(rank, num_ranks)  # before the library reads its variables
        torch_defaults.apply()  # before the test's modules are imported
        _has_defaults = True
    fn, args = ForkingPickler.loads(task)
    result = fn(Rank(rank, num_ranks, unique_id), *args)
    distributed = sys.modules.get("torch.distributed")
    if not fresh and distributed is not None and distributed.is_initialized():
        raise AssertionError("the test leaves torch's process group to the next one on this rank")
    return result


def run_threads(
    num_ranks: int, fn: Callable[..., Any], *args: Any, timeout: float = 60
) -> list[Any]:
    """Runs ``fn(Rank, *args)`` in `num_ranks` threads of this process and returns their results."""
    unique_id = _core.unique_id()
    results: list[Any] = [None] * num_ranks
    failures: list[launch.Failure | None] = [
        launch.Failure(rank, "no answer in time", answered=False) for rank in range(num_ranks)
    ]

    def serve(rank: int) -> None:
        torch_defaults.apply(alone=False)
        try:
            results[rank] = fn(Rank(rank, num_ranks, unique_id), *args)
            failures[rank] = None
        except BaseException as error:  # SystemExit and pytest's outcomes are failures, too
            failures[rank] = launch.Failure(
                rank, repr(error), error, traceback=traceback.format_exc()
            )

    threads = [
        threading.Thread(target=serve, args=(rank,), daemon=True) for rank in range(num_ranks)
    ]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + PATIENCE * timeout
    for thread in threads:
        thread.join(max(0, deadline - time.monotonic()))
    if failed := [failure for failure in failures if failure]:
        raise launch.RankFailed(failed)
    return results
