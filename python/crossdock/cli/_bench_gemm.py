"""``crossdock bench gemm``: products, measured through the C API.

The ranks are those of a program of the C++ build, which this starts.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile
from typing import Any

from crossdock.cli import _bench_options, _gpus, _report
from crossdock.cli._usage import OK, USAGE, CommandError, UsageError, add_number

_DESCRIPTION = """Times products of matrices that are spread over ranks, by every algorithm that
hides their transfer, beside the product and the transfer alone. The ranks are those of the program
crossdock-bench, which cmake --install puts into PREFIX/bin beside crossdock-run: pip installs
neither. Its results are checked before they are timed. Options that are not in this list go to it:
crossdock-bench gemm --help tells of shapes, tokens, element types, iterations and seed."""
_PROGRAMS = ("crossdock-run", "crossdock-bench")
# Where they lie in what was installed, and in a build folder.
_FOLDERS = ("", "bin", "bench", "tools/run")
_LONGEST = 24 * 3600  # seconds; waits for a rank end much earlier


def add_command(kinds: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds ``gemm`` to the benchmarks."""
    parser = kinds.add_parser(
        "gemm", help="products overlapped with their transfer", description=_DESCRIPTION
    )
    add_number(
        parser,
        "--ranks",
        "W",
        "rank processes (default: one per core, at most 4; on GPUs one per GPU)",
    )
    parser.add_argument(
        "--programs",
        type=pathlib.Path,
        metavar="FOLDER",
        help="an installed tree or a build folder that has both (default: they are in PATH)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), help="what the ranks compute on")
    _bench_options.add_outputs(parser)
    parser.set_defaults(run=run, passed_on=[])


def find_programs(folder: pathlib.Path | None) -> list[str]:
    """The launcher and the benchmark, or UsageError."""
    found = []
    for name in _PROGRAMS:
        if folder:
            places = [str(folder / below) for below in _FOLDERS]
            program = shutil.which(name, path=os.pathsep.join(places))
        else:
            program = shutil.which(name)
        if not program:
            where = f"--programs {folder}: there is no {name}" if folder else f"no {name} in PATH"
            raise UsageError(
                f"{where}; build Crossdock's C++ programs with cmake, and name their folder by "
                "--programs FOLDER (pip installs none)"
            )
        found.append(program)
    return found


def _ranks(arguments: argparse.Namespace) -> int:
    if arguments.ranks:
        return int(arguments.ranks)
    if arguments.device == "cuda":
        return _gpus.usable_count(_gpus.find()[0]) or 1
    return min(4, len(os.sched_getaffinity(0)))


def _command(arguments: argparse.Namespace, json_file: pathlib.Path) -> list[str]:
    launcher, program = find_programs(arguments.programs)
    launch = ["-n", str(_ranks(arguments)), "--no-prefix", "--timeout", str(_LONGEST), "--"]
    device = ["--device", arguments.device] if arguments.device else []
    options = [*device, *arguments.passed_on, "--json", str(json_file)]
    return [launcher, *launch, program, "gemm", *options]


def run(arguments: argparse.Namespace) -> int:
    """Measures and writes; the program prints."""
    _bench_options.check_outputs(arguments)
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder) / "gemm.json"
        command = _command(arguments, path)
        sys.stdout.flush()
        code = subprocess.run(command, check=False).returncode
        if code == USAGE:  # the program has said why
            return USAGE
        if code != 0:
            raise CommandError(f"crossdock-bench gemm has failed with exit code {code}")
        report = json.loads(path.read_text())
    if arguments.json:
        _report.write_json(report, arguments.json)
    if arguments.plot:
        draw(report, arguments.plot)
    return OK


def draw(report: dict[str, Any], path: pathlib.Path) -> None:
    """Draws p50 against the number of tokens, a panel for each shape."""
    shapes = list(dict.fromkeys(row["shape"] for row in report["rows"]))
    ways = list(dict.fromkeys(row["way"] for row in report["rows"]))
    colours = {way: f"C{number}" for number, way in enumerate(ways)}
    with _report.panels(path, len(shapes), 5) as panels:
        for axes, shape in zip(panels, shapes):
            _draw_shape(axes, [row for row in report["rows"] if row["shape"] == shape], colours)
            axes.set_title(f"{shape}\n{report['title']}", fontsize=8)


def _draw_shape(axes: Any, rows: list[dict[str, Any]], colours: dict[str, str]) -> None:
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        axes.plot(
            [row["tokens"] for row in own],
            [row["p50_us"] for row in own],
            "o-" if "algo" in own[0] else "s--",
            color=colours[way],
            markersize=4,
            label=way,
        )
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    tokens = sorted({row["tokens"] for row in rows})
    axes.set_xticks(tokens, labels=[str(count) for count in tokens])
    axes.minorticks_off()
    axes.set_xlabel("tokens of all ranks")
    axes.set_ylabel("microseconds, p50 of the slowest rank")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
