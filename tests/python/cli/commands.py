"""Runs the command `crossdock` as its users do: as a process. A small batch for its parts."""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys
import time
from typing import Any

from crossdock.cli._workload import Workload

COMMAND = [sys.executable, "-m", "crossdock.cli"]
SMALL = [
    "--device",
    "cpu",
    "--ranks",
    "2",
    "--tokens",
    "16",
    "--hidden",
    "32",
    "--topk",
    "2",
    "--experts",
    "4",
]


def run(
    *arguments: str, environment: dict[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The finished command. It may take a minute; a stack trace is a failure in any case."""
    ended = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        env=os.environ | (environment or {}),
        check=False,
        **options,
    )
    assert "Traceback" not in ended.stderr + ended.stdout, ended.stderr + ended.stdout
    return ended


def start(*arguments: str) -> subprocess.Popen[str]:
    """The running command."""
    return subprocess.Popen(
        [*COMMAND, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


def children(parent: int) -> list[int]:
    """Processes that `parent` has started and not yet waited for."""
    found = []
    for stat in pathlib.Path("/proc").glob("[0-9]*/stat"):
        try:
            # pid (name) state parent ...; the name may hold anything.
            state, owner = stat.read_text().rpartition(")")[2].split()[:2]
        except (OSError, ValueError):
            continue  # it has ended meanwhile
        if int(owner) == parent and state != "Z":
            found.append(int(stat.parent.name))
    return found


def alive(process: int) -> bool:
    """Whether it still runs."""
    try:
        text = pathlib.Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] != "Z"


def wait_until(condition, seconds: float = 30) -> None:
    """Returns when condition() holds; AssertionError if that takes longer."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)


def workload(**changes: Any) -> Workload:
    """A batch, as a benchmark's options describe it."""
    fields = {
        "ranks": 4,
        "tokens": 9,
        "hidden": 8,
        "topk": 3,
        "experts": 8,
        "layout": "expert_major",
        "dtype": "fp32",
        "routing": "uniform",
        "seed": 7,
        "device": "cpu",
        "through": "numpy",
        "iters": 1,
        "warmup": 0,
        "timeout": 10,
    }
    return Workload(**fields | changes)
