"""``crossdock trace``: what a command's ranks did when, for a viewer of traces."""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from typing import Any

from crossdock.cli._usage import INTERRUPTED, CommandError

_Event = dict[str, Any]


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``trace`` to the commands."""
    parser = commands.add_parser(
        "trace",
        help="record when a command's ranks do what",
        description="Runs a command with XD_TRACE set, and joins what its processes write to one "
        "file for https://ui.perfetto.dev or chrome://tracing: a line for each group of each rank, "
        "with its operations and, on the CPU, their parts. On CUDA an operation is shown while it "
        "is enqueued, with --device also while it runs. Ends with the command's exit code.",
    )
    parser.add_argument(
        "-o", "--output", default="trace.json", help="file to write (default: %(default)s)"
    )
    parser.add_argument(
        "--device",
        action="store_true",
        help="on CUDA, also when operations run, by two events beside each (not in graphs)",
    )
    parser.add_argument(
        "command",
        nargs="+",
        metavar="-- COMMAND",
        help="for example: -- torchrun --nproc-per-node 4 train.py",
    )
    parser.set_defaults(run=run)


def _events(file: pathlib.Path) -> Iterator[_Event]:
    """The events of one process, whose last one may be cut."""
    for line in file.read_text(errors="replace").splitlines()[1:]:
        try:
            yield json.loads(line.rstrip(","))
        except ValueError:
            continue


def join(files: Sequence[pathlib.Path]) -> dict[str, list[_Event]]:
    """The events of all files. Processes of several hosts may have equal numbers."""
    events = []
    for number, file in enumerate(sorted(files), 1):
        events += [event | {"pid": number} for event in _events(file)]
    return {"traceEvents": events}


def _run(command: Sequence[str], folder: str, device: bool) -> int:
    wanted = {"XD_TRACE": folder} | ({"XD_TRACE_DEVICE": "1"} if device else {})
    try:
        child = subprocess.Popen(command, env=os.environ | wanted)
    except OSError as error:
        raise CommandError(f"trace: {command[0]}: {error.strerror}") from None
    while True:
        try:
            code = child.wait()
            return code if code >= 0 else 128 - code  # as shells count signals
        except KeyboardInterrupt:  # the command has got it as well, and ends
            try:
                child.wait(timeout=10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            return INTERRUPTED


def run(arguments: argparse.Namespace) -> int:
    """Runs ``crossdock trace``."""
    output = pathlib.Path(arguments.output)
    try:
        with tempfile.TemporaryDirectory(prefix=".trace-", dir=output.parent) as folder:
            where = str(pathlib.Path(folder).absolute())
            code = _run(arguments.command, where, arguments.device)
            files = list(pathlib.Path(folder).glob("*.trace.json"))
            if not files:
                raise CommandError(f"trace: no process of {arguments.command[0]} has made a group")
            output.write_text(json.dumps(join(files), separators=(",", ":")))
    except OSError as error:
        raise CommandError(f"trace: {output}: {error.strerror}") from None
    print(f"{output}: {len(files)} processes; open it in https://ui.perfetto.dev")
    return code
