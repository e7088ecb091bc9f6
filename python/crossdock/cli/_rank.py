"""A rank process of the command line; _launch.py starts it and listens.

Arguments: the descriptor to answer on. Standard input: one line of JSON, the task; when it ends
after that, the parent is gone, and so goes this process.
"""

from __future__ import annotations

import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

from crossdock.cli._engine import make_engine
from crossdock.cli._workload import Workload

_Tell = Callable[[str, float], None]  # what is being done, and its share that is done


def _trial(workload: Workload, tell: _Tell) -> dict[str, Any]:
    """One round trip with every element checked."""
    with make_engine(workload) as engine:
        engine.check()
    return {}


def _bench(workload: Workload, tell: _Tell) -> dict[str, Any]:
    """Checks one round trip, then times every operation."""
    tell("starting", 0.0)
    with make_engine(workload) as engine:
        tell("checking", 0.0)
        engine.check()
        operations = engine.operations()
        times = {}
        for number, (name, call) in enumerate(operations.items()):
            def share(done: float, name: str = name, number: int = number) -> None:
                tell(name, (number + done) / len(operations))

            times[name] = engine.time(call, share)
        return {"times": times, "versions": engine.versions()}


_JOBS = {"trial": _trial, "bench": _bench}


def _read_task() -> dict[str, Any]:
    line = b""
    # Unbuffered: _end_with_parent reads on where this stops.
    while not line.endswith(b"\n"):
        line += os.read(0, 1 << 16) or b"{}\n"
    return json.loads(line)


def _end_with_parent() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)


def main() -> None:
    """Does the task; what it returns, or the error that ended it, is the last line answered."""
    answers = os.fdopen(int(sys.argv[1]), "w")

    def answer(**message: Any) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    task = _read_task()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        workload = Workload(**task["workload"])
        result = _JOBS[task["job"]](
            workload, lambda doing, done: answer(doing=doing, done=done))
    except Exception as error:  # whatever it is, the parent says it to the user
        first_line = str(error).partition("\n")[0]
        answer(error=type(error).__name__, text=f"{type(error).__name__}: {first_line}")
    else:
        answer(result=result)


if __name__ == "__main__":
    main()
