"""``crossdock demo``: trains a small language model with its experts spread over ranks."""

from __future__ import annotations

import argparse
import importlib.util
import os
import pathlib
import sys
from typing import NoReturn

from crossdock.cli import _host
from crossdock.cli._usage import CommandError, UsageError, number

_PROGRAM = pathlib.Path("examples/torch/train_moe_lm.py")
_RANKS = (1, 2, 4, 8)  # numbers of ranks that share the program's 16 sequences and 8 experts evenly


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``demo`` to the commands."""
    parser = commands.add_parser(
        "demo",
        help="train a small mixture-of-experts language model over ranks",
        description="Trains a byte-level language model on the source files of Python's standard "
        "library, once in one process without Crossdock and once with its experts spread over "
        "ranks, compares the losses, writes some text, and draws FOLDER/loss.png. About two "
        "minutes on two cores. Needs PyTorch and matplotlib.",
    )
    parser.add_argument(
        "--ranks",
        type=number(1),
        default=4,
        metavar="W",
        help="rank processes; on GPUs if there are as many (2 ranks where there "
        "are 2 or 3 GPUs), else on the CPU (default: %(default)s)",
    )
    parser.add_argument(
        "--folder", default="demo", help="for logs and the figure (default: %(default)s)"
    )
    parser.add_argument(
        "options",
        nargs="*",
        metavar="-- OPTIONS",
        help="of the training program; -- --help lists them",
    )
    parser.set_defaults(run=run)


def program() -> pathlib.Path:
    """The training program: beside the package where it is installed, else in the source tree."""
    places = (_host.installed_at(), pathlib.Path(__file__).resolve().parents[3])
    for place in places:
        if (place / _PROGRAM).is_file():
            return place / _PROGRAM
    raise CommandError(f"the training program is not installed: there is no {places[0] / _PROGRAM}")


def run(arguments: argparse.Namespace) -> NoReturn:
    """Becomes the training program: output, exit code and Ctrl-C are its own."""
    for package in ("torch", "matplotlib"):
        if importlib.util.find_spec(package) is None:
            raise UsageError(f"demo: needs {package}, which is not installed")
    if arguments.ranks not in _RANKS and not arguments.options:
        raise UsageError(
            f"demo: --ranks {arguments.ranks}: expected one of {', '.join(map(str, _RANKS))}, "
            "which share 16 sequences and 8 experts evenly; others need other sizes, as in "
            "'crossdock "
            f"demo --ranks {arguments.ranks} -- --sequences {4 * arguments.ranks} "
            f"--experts {2 * arguments.ranks}'"
        )
    options = [
        "--called",
        "crossdock demo",
        "--demo",
        "--ranks",
        str(arguments.ranks),
        "--folder",
        arguments.folder,
    ]
    command = [sys.executable, str(program()), *options, *arguments.options]
    # The program imports the crossdock that runs here, wherever that lies.
    paths = [str(_host.installed_at().parent), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
    os.execve(sys.executable, command, environment)
