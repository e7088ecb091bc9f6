"""The work of one rank of a command."""

from __future__ import annotations

import contextlib
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
        launch.tell(("checking", 0.0))
        engine.check()
        operations = engine.operations()
        times = {}
        for number, (name, call) in enumerate(operations.items()):

            def share(done: float, name: str = name, number: int = number) -> None:
                launch.tell((name, (number + done) / len(operations)))

            times[name] = engine.time(call, share)
        return {"times": times, "versions": engine.versions()}
