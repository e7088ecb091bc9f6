"""Runs a function on several ranks: as processes that are kept for the next test, or as threads.

A function for ranks is a module-level function ``fn(me: Rank, *args)``; what it returns comes back
as a list, one item per rank. A rank that raises, dies or hangs fails the call with every rank's
traceback.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import functools
import inspect
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest

import crossdock
import spread
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
    among: int = 4,
) -> list[Any]:
    """Runs ``fn(Rank, *args)`` in `num_ranks` processes and returns their results.

    The processes have torchrun's environment variables. They are some of `among` processes, or of
    more, which serve later calls too; with `fresh` they are new and end with this call. With
    `apart` they are on two hosts, as `spread` has them. On a failure all of them are killed.
    """
    number = num_ranks if fresh else max(num_ranks, among)
    ranks = None if fresh else _pools.pop((number, apart), None)
    if ranks is None or not ranks.alive():
        with spread.starting() if apart else contextlib.nullcontext():
            ranks = launch.Ranks(number)
    task = bytes(ForkingPickler.dumps((fn, args)))
    # Of the processes on two hosts those in the middle, so that half of the ranks is on each.
    first = (number + 1) // 2 - (num_ranks + 1) // 2 if apart else 0
    place = _Place(first, num_ranks, number, apart)
    try:
        results = ranks.run(
            _call,
            place,
            _core.unique_id(),
            task,
            fresh,
            timeout=PATIENCE * timeout,
            grace=GRACE_SECONDS,
        )
    except BaseException:
        ranks.kill()
        raise
    if fresh:
        ranks.kill()
    else:
        _pools[number, apart] = ranks
    return results[first : first + num_ranks]


def as_test(
    fn: Callable[..., Any], start: Callable[..., object], own: tuple[str, ...] = ()
) -> Callable[..., Any]:
    """Makes a test that calls ``start(test, *args, **given)``, of a function ``fn(me, *args)``.

    The test's parameters and fixtures are the arguments of `fn` behind its first one, which come as
    `args`, and its `own`, which come by name. Called with a first argument, as ranks do, the test
    is `fn`; so it can be pickled, and other tests may use it. It prints the SEED of its module, if
    there is one. A test is made another one likewise, whose ranks call the first.
    """
    body = getattr(fn, "body", fn)
    _, *arguments = inspect.signature(body).parameters.values()

    @functools.wraps(body)
    def test(*args: Any, **given: Any) -> Any:
        if args:
            return body(*args, **given)
        if "SEED" in body.__globals__:
            print(f"seed {body.__globals__['SEED']}")
        names = [one.name for one in arguments if one.name in given]
        return start(
            called, *(given[name] for name in names), **{name: given[name] for name in own}
        )

    called = test if body is fn else fn  # which its module has under its name
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    del test.__wrapped__  # pytest would take its `me` for a fixture
    test.body = body
    test.__signature__ = inspect.Signature(
        [*arguments, *(inspect.Parameter(name, keyword) for name in own)]
    )
    return test


@dataclasses.dataclass(frozen=True)
class Apart:
    """A number of ranks that are on two hosts, as `spread` has them."""

    num_ranks: int

    def __str__(self) -> str:
        return f"{self.num_ranks} apart"


def on_ranks(
    *num_ranks: Any,
    loses: int | None = None,
    run: Callable[..., object] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Makes a function ``fn(me: Rank, *args)`` a test, which ranks run; see `as_test`.

    Args:
        num_ranks: how many: the test runs once on each number, which may be `Apart` or a
            ``pytest.param``. A function is called with `args` and returns the number.
        loses: the rank whose process ends in the test; the other ranks must survive that.
        run: a function that is called as `run_ranks` is, such as `run_threads`; None = that one.
        options: for `run`.
    """
    several = len(num_ranks) > 1

    def start(test: Callable[..., Any], *args: Any, num_ranks: Any = num_ranks[0]) -> None:
        number = num_ranks(*args) if callable(num_ranks) else num_ranks
        more = options
        if isinstance(number, Apart):
            number, more = number.num_ranks, options | {"apart": True}
        with failure_of(loses):
            (run or run_ranks)(number, test, *args, **more)

    def decorate(fn: Callable[..., Any]) -> Callable[..., Any]:
        if not several:
            return as_test(fn, start)
        test = as_test(fn, start, own=("num_ranks",))
        return pytest.mark.parametrize("num_ranks", num_ranks, ids=str)(test)

    return decorate


@contextlib.contextmanager
def failure_of(rank: int | None) -> Iterator[None]:
    """Expects that rank, and no other one, to fail; None = none."""
    if rank is None:
        yield
        return
    with pytest.raises(launch.RankFailed) as caught:
        yield
    assert [failure.rank for failure in caught.value.failures] == [rank], caught.value


# Processes by their number, and whether they are apart, while no call uses them.
_pools: dict[tuple[int, bool], launch.Ranks] = {}


@atexit.register
def _kill_pools() -> None:
    while _pools:
        _pools.popitem()[1].kill()


@dataclasses.dataclass(frozen=True)
class _Place:
    """The processes that run a function, from the `first` of all on; the others have no part."""

    first: int
    num_ranks: int
    processes: int
    apart: bool


def _call(process: int, place: _Place, unique_id: bytes, task: bytes, fresh: bool) -> Any:
    rank = process - place.first
    if not 0 <= rank < place.num_ranks:
        return None
    if place.apart:
        spread.declare(process, place.processes)  # before the library reads its variables
    with _as_torchrun(rank, place.num_ranks):
        fn, args = ForkingPickler.loads(task)
        result = fn(Rank(rank, place.num_ranks, unique_id), *args)
    distributed = sys.modules.get("torch.distributed")
    if not fresh and distributed is not None and distributed.is_initialized():
        raise AssertionError("the test leaves torch's process group to the next one on this rank")
    return result


@contextlib.contextmanager
def _as_torchrun(rank: int, num_ranks: int) -> Iterator[None]:
    """Has torchrun's environment variables say this, as a process may be another rank each time."""
    numbers = {"RANK": rank, "LOCAL_RANK": rank}
    numbers |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
    before = {name: os.environ[name] for name in numbers}
    os.environ.update({name: str(number) for name, number in numbers.items()})
    try:
        yield
    finally:
        os.environ.update(before)


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
