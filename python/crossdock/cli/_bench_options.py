"""Options that benchmarks have in common, and the batch that they describe."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import math
import pathlib
from collections.abc import Callable
from typing import Any

from crossdock._config import Layout
from crossdock._core import constants
from crossdock.cli import _console, _gpus
from crossdock.cli._doctor import feature
from crossdock.cli._launch import run_ranks
from crossdock.cli._usage import UsageError, add_number
from crossdock.cli._workload import ITEM_BYTES, ROUTINGS, Workload

# The library's limits, each for itself; --topk also depends on --experts.
_LIMITS = {
    "ranks": constants.MAX_RANKS,
    "experts": constants.MAX_EXPERTS,
    "tokens": constants.MAX_TOKENS,
    "hidden": 1 << 24,
    "timeout": 2**31 // 1000,
}
_PLOT_FORMATS = (".png", ".svg", ".pdf")


@dataclasses.dataclass(frozen=True)
class Defaults:
    """In what the benchmarks' common options differ."""

    hidden: int
    experts: int
    iters: int
    warmup: int


def add_options(parser: argparse.ArgumentParser, defaults: Defaults) -> argparse._ArgumentGroup:
    """Adds the common options. Returns the group of those that say what is moved."""
    sizes = parser.add_argument_group("what is moved")
    _add_sizes(sizes, defaults)
    _add_measuring(parser, defaults)
    add_outputs(parser)
    return sizes


def _add_sizes(sizes: argparse._ArgumentGroup, defaults: Defaults) -> None:
    """Adds the options that say what is moved."""
    add_number(sizes, "--ranks", "W", "rank processes (default: 4, on GPUs one per GPU)")
    add_number(sizes, "--hidden", "H", "elements of a token's row", defaults.hidden)
    add_number(sizes, "--topk", "K", "experts that a token chooses", 8)
    add_number(sizes, "--experts", "E", "experts of all ranks together", defaults.experts)
    sizes.add_argument(
        "--dtype",
        choices=ITEM_BYTES,
        help="of rows (default: bf16, without PyTorch and ml_dtypes fp32)",
    )
    sizes.add_argument(
        "--routing",
        choices=ROUTINGS,
        default=ROUTINGS[0],
        help="how tokens choose experts (default: %(default)s)",
    )
    add_number(sizes, "--seed", "N", "of the routing", 1, least=0)


def _add_measuring(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    """Adds the options that say how it is measured."""
    how = parser.add_argument_group("how it is measured")
    how.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        help="what the ranks compute on (default: cuda where it can be used)",
    )
    how.add_argument(
        "--through",
        choices=("numpy", "torch"),
        help="whose arrays (default: torch where it is installed)",
    )
    add_number(how, "--iters", "N", "timed iterations of each operation", defaults.iters)
    add_number(how, "--warmup", "N", "iterations before that", defaults.warmup, least=0)
    add_number(how, "--timeout", "SECONDS", "longest wait of a rank for another", 120)


def add_outputs(parser: argparse.ArgumentParser) -> None:
    """Adds the options that say where results go."""
    where = parser.add_argument_group("where results go, beside the table")
    where.add_argument("--json", type=pathlib.Path, metavar="FILE", help="all numbers")
    where.add_argument(
        "--plot",
        type=pathlib.Path,
        metavar="FILE",
        help="a figure: .png, .svg or .pdf (needs matplotlib)",
    )


def _has(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def workload(
    arguments: argparse.Namespace, tokens: int, layout: Layout, limits: dict[str, int]
) -> Workload:
    """Options with their defaults filled in, or UsageError.

    `limits` has the benchmark's own, by option, which may be smaller than the library's.
    """
    device = arguments.device or _default_device(arguments.through)
    available, reason = feature(device)
    if not available:
        raise UsageError(f"--device {device}: {reason}")
    through = arguments.through or ("torch" if _has("torch") else "numpy")
    if not _has(through):
        raise UsageError(f"--through {through}: {through} is not installed")
    if device == "cuda" and through == "numpy":
        raise UsageError("--through numpy: NumPy has no arrays on GPUs; use --through torch")
    has_bf16 = through == "torch" or _has("ml_dtypes")
    dtype = arguments.dtype or ("bf16" if has_bf16 else "fp32")
    if dtype == "bf16" and not has_bf16:
        raise UsageError("--dtype bf16: NumPy has it with ml_dtypes only, which is not installed")
    asked = Workload(
        ranks=_ranks(arguments.ranks, device),
        tokens=tokens,
        hidden=arguments.hidden,
        topk=arguments.topk,
        experts=arguments.experts,
        layout=layout,
        dtype=dtype,
        routing=arguments.routing,
        seed=arguments.seed,
        device=device,
        through=through,
        iters=arguments.iters,
        warmup=arguments.warmup,
        timeout=arguments.timeout,
    )
    _check_sizes(asked, _LIMITS | limits)
    return asked


def _default_device(through: str | None) -> str:
    usable = feature("cuda")[0] and _has("torch") and _gpus.usable_count(_gpus.find()[0])
    return "cuda" if usable and through != "numpy" else "cpu"


def _ranks(asked: int | None, device: str) -> int:
    if device == "cpu":
        return asked or 4
    gpus, why_none = _gpus.find()
    usable = _gpus.usable_count(gpus)
    if not usable:
        raise UsageError(f"--device cuda: {why_none or 'CUDA_VISIBLE_DEVICES shows no GPU'}")
    if asked and asked > usable:
        raise UsageError(f"--ranks {asked}: {usable} GPUs can be used here, each by one rank")
    return asked or usable


def _check_sizes(workload: Workload, limits: dict[str, int]) -> None:
    for name, most in limits.items():
        if getattr(workload, name) > most:
            raise UsageError(f"--{name} {getattr(workload, name)}: at most {most}")
    if workload.experts % workload.ranks:
        nearest = math.ceil(workload.experts / workload.ranks) * workload.ranks
        raise UsageError(
            f"--experts {workload.experts}: not a multiple of --ranks "
            f"{workload.ranks}; {nearest} would be"
        )
    most, unit = constants.MAX_TOPK, constants.ROW_ALIGNMENT
    if workload.topk > min(workload.experts, most):
        raise UsageError(
            f"--topk {workload.topk}: at most {most}, and no more than --experts {workload.experts}"
        )
    if workload.row_bytes % unit:
        elements = unit // ITEM_BYTES[workload.dtype]
        raise UsageError(
            f"--hidden {workload.hidden}: rows are multiples of {unit} bytes, so of "
            f"{elements} elements of {workload.dtype}"
        )


def check_outputs(arguments: argparse.Namespace) -> None:
    """Before minutes of measuring, not after."""
    for option, path in (("--json", arguments.json), ("--plot", arguments.plot)):
        if path and not path.absolute().parent.is_dir():
            raise UsageError(f"{option} {path}: there is no folder {path.parent}")
        if path and path.is_dir():
            raise UsageError(f"{option} {path}: is a folder")
    if arguments.plot and arguments.plot.suffix not in _PLOT_FORMATS:
        raise UsageError(
            f"--plot {arguments.plot}: expected a name that ends with {', '.join(_PLOT_FORMATS)}"
        )
    if arguments.plot and not _has("matplotlib"):
        raise UsageError("--plot: matplotlib is not installed")


def measure(title: str, ranks: int, job: Callable[..., Any], *args: Any) -> list[Any]:
    """Runs ``job(rank, *args)`` with a progress bar; what each rank returned."""
    # Importing, sizing and checking come before the waits that the ranks bound themselves.
    limit = 24 * 3600
    with _console.progress(title) as advance:
        return run_ranks(
            ranks, job, *args, limit=limit, hear=lambda rank, message: advance(*message)
        )
