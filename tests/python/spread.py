"""Ranks of tests on two hosts, which share no memory and talk over the loopback interface.

The first half of the ranks, rounded up, is on the first host. They are processes of this machine
all the same, and have the library of the tests, which `starting` gives them.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Iterator
from pathlib import Path

from crossdock import _core

_VARIABLE = "XD_HOST_ID"  # which no process has where ranks are on one host


def _library() -> Path:
    """The library that this process has loaded."""
    assert _core  # which has loaded it
    maps = Path("/proc/self/maps").read_text().splitlines()
    return next(Path(line.split(maxsplit=5)[5]) for line in maps if "/libcrossdock.so" in line)


@functools.cache
def environment() -> dict[str, str]:
    """The variables with which processes start that are to have the library of the tests."""
    folder = _library().parent
    if folder.name != "instrumented":
        folder /= "instrumented"
    assert any(folder.glob("libcrossdock.so.*")), (
        f"{folder} has no library of the tests: build crossdock-instrumented"
    )
    others = os.environ.get("LD_LIBRARY_PATH")
    return {"LD_LIBRARY_PATH": os.pathsep.join([str(folder), *([others] if others else [])])}


@contextlib.contextmanager
def starting() -> Iterator[None]:
    """Processes that are started meanwhile have the library of the tests."""
    before = os.environ.copy()
    os.environ.update(environment())
    try:
        yield
    finally:
        os.environ.pop("LD_LIBRARY_PATH")
        os.environ.update(before)


def declare(rank: int, num_ranks: int) -> None:
    """Puts this process, which is that rank, on its host. Before the library is used."""
    assert _library().parent.name == "instrumented", "the process was not begun by `starting`"
    os.environ["XD_NET_TEST"] = "apart"
    os.environ["XD_NET_IFACE"] = "127.0.0.1"
    os.environ[_VARIABLE] = f"host {_host_of(rank, num_ranks)}"


def hosts(num_ranks: int) -> list[int]:
    """The host of each rank, as this process, a rank, knows it: 0 where ranks are on one."""
    apart = _VARIABLE in os.environ
    return [_host_of(rank, num_ranks) if apart else 0 for rank in range(num_ranks)]


def _host_of(rank: int, num_ranks: int) -> int:
    return 2 * rank // num_ranks
