"""The work of one rank of a command."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

from crossdock import launch
from crossdock.cli._engine import Engine
from crossdock.cli._workload import Workload


def _engine(workload: Workload) -> contextlib.AbstractContextManager[Engine]:
    """Joins the other ranks through the environment's meeting point."""
    if workload.through == "torch":
        from crossdock.cli._engine_torch import TorchEngine

        return TorchEngine(workload)
    from crossdock.cli._engine_numpy import NumpyEngine

    return NumpyEngine(workload)


def _low_latency_engine(workload: Workload) -> contextlib.AbstractContextManager[Engine]:
    """As `_engine`."""
    if workload.through == "torch":
        from crossdock.cli._ll_torch import TorchLowLatency

        return TorchLowLatency(workload)
    from crossdock.cli._ll_numpy import NumpyLowLatency

    return NumpyLowLatency(workload)


def trial(rank: int, workload: Workload) -> None:
    """One round trip with every element checked."""
    with _engine(workload) as engine:
        engine.check()


def bench(rank: int, workload: Workload) -> dict[str, Any]:
    """Checks one round trip, then times every operation.

    Tells (what is being done, and its share that is done).
    """
    launch.tell(("starting", 0.0))
    with _engine(workload) as engine:
        return {"times": _times(engine, "", _whole), "versions": engine.versions()}


def bench_low_latency(rank: int, workloads: list[Workload]) -> dict[str, Any]:
    """Does for each workload what `bench` does: {"times": of each, "versions": ...}."""
    launch.tell(("starting", 0.0))
    times = []
    versions: dict[str, str] = {}
    for number, workload in enumerate(workloads):

        def share(done: float, number: int = number) -> float:
            return (number + done) / len(workloads)

        with _low_latency_engine(workload) as engine:
            times.append(_times(engine, f"{workload.tokens} tokens, ", share))
            versions = engine.versions()
    return {"times": times, "versions": versions}


def _times(engine: Engine, prefix: str, share_of_all: Callable[[float], float]) -> dict[Any, Any]:
    """Seconds of every operation, by the name that the engine gives it."""
    launch.tell((f"{prefix}checking", share_of_all(0.0)))
    engine.check()
    operations = engine.operations()
    times = {}
    for number, (name, timed) in enumerate(operations.items()):
        what = f"{prefix}{name if isinstance(name, str) else name.operation}"

        def tell(done: float, what: str = what, number: int = number) -> None:
            launch.tell((what, share_of_all((number + done) / len(operations))))

        times[name] = engine.time(timed, tell)
    return times


def _whole(done: float) -> float:
    return done
