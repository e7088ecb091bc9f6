"""Runs the command `crossdock`, as its users do or in this process. A small batch for its parts."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pathlib
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Any
from unittest import mock

from crossdock.cli import main
from crossdock.cli._workload import Workload

COMMAND = [sys.executable, "-m", "crossdock.cli"]
SMALL = "--device cpu --ranks 2 --tokens 16 --hidden 32 --topk 2 --experts 4".split()
QUICK = [*SMALL, *"--through numpy --dtype fp32 --iters 2".split()]


def run(
    *arguments: str, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """The command's end and output; it runs in this process, which may not see its children's."""
    out, err = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, environment or {}),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            code = main(arguments)
        except SystemExit as end:  # how argparse ends
            code = int(end.code or 0)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def process(
    *arguments: str, environment: Mapping[str, str] | None = None, **options: Any
) -> subprocess.CompletedProcess[str]:
    """The same as a process of its own. It may take a minute; a stack trace is a failure."""
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


def report(path: pathlib.Path, *arguments: str) -> tuple[dict[str, Any], str]:
    """The file that a benchmark, which must succeed, has written, and its output."""
    ended = run("bench", *arguments, "--json", str(path))
    assert ended.returncode == 0, ended.stderr
    return json.loads(path.read_text()), ended.stdout


def wide_lines(text: str) -> list[str]:
    """The lines that do not fit a terminal of 80 columns."""
    return [line for line in text.splitlines() if len(line) > 80]


def start(*arguments: str) -> subprocess.Popen[str]:
    """The running command, which Ctrl-C interrupts also where this process ignores it."""
    return subprocess.Popen(
        [*COMMAND, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
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
