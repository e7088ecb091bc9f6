"""The work of one rank of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from crossdock import launch
from crossdock.cli import _engine
from crossdock.cli._engine import Engine, Share
from crossdock.cli._ll_steps import ROUNDS
from crossdock.cli._workload import Workload


def _engine_for(workload: Workload) -> contextlib.AbstractContextManager[Engine]:
    """Joins the other ranks through the environment's meeting point."""
    if workload.through == "torch":
        from crossdock.cli._engine_torch import TorchEngine

        return TorchEngine(workload)
    from crossdock.cli._engine_numpy import NumpyEngine

    return NumpyEngine(workload)


def _low_latency_engine(workload: Workload) -> contextlib.AbstractContextManager[Engine]:
    """As `_engine_for`."""
    if workload.through == "torch":
        from crossdock.cli._ll_torch import TorchLowLatency

        return TorchLowLatency(workload)
    from crossdock.cli._ll_numpy import NumpyLowLatency

    return NumpyLowLatency(workload)


def trial(rank: int, workload: Workload) -> None:
    """One round trip with every element checked."""
    with _engine_for(workload) as engine:
        engine.check()


def bench(rank: int, workload: Workload) -> dict[str, Any]:
    """Checks one round trip, then times every operation.

    Tells (what is being done, and its share that is done).
    """
    launch.tell(("starting", 0.0))
    with _engine_for(workload) as engine:
        once = _engine.shares(workload, 1)
        return {"times": _times(engine, once, "", _whole), "versions": engine.versions()}


def bench_low_latency(rank: int, workloads: list[Workload]) -> dict[str, Any]:
    """Does for each workload what `bench` does: {"times": of each, "versions": ...}."""
    launch.tell(("starting", 0.0))
    times = []
    versions: dict[str, str] = {}
    for number, workload in enumerate(workloads):

        def share(done: float, number: int = number) -> float:
            return (number + done) / len(workloads)

        rounds = _engine.shares(workload, ROUNDS)
        with _low_latency_engine(workload) as engine:
            times.append(_times(engine, rounds, f"{workload.tokens} tokens, ", share))
            versions = engine.versions()
    return {"times": times, "versions": versions}


def _times(
    engine: Engine, rounds: list[Share], prefix: str, share_of_all: Callable[[float], float]
) -> dict[Any, list[float]]:
    """Seconds of every operation, by the name that the engine gives it.

    A round does a share of every operation's iterations, so that all meet the same machine.
    """
    launch.tell((f"{prefix}checking", share_of_all(0.0)))
    engine.check()
    operations = engine.operations()
    times: dict[Any, list[float]] = {name: [] for name in operations}
    turns = [(share, name) for share in rounds for name in operations]
    for number, (share, name) in enumerate(turns):
        what = f"{prefix}{name if isinstance(name, str) else name.operation}"

        def tell(done: float, what: str = what, number: int = number) -> None:
            launch.tell((what, share_of_all((number + done) / len(turns))))

        times[name] += engine.time(operations[name], share, tell)
    return times


def _whole(done: float) -> float:
    return done
