"""The results of a benchmark, as a table, as JSON, as a plot."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import math
import pathlib
from collections.abc import Iterator
from typing import Any

import crossdock
from crossdock.cli import _console, _host
from crossdock.cli._usage import CommandError
from crossdock.cli._workload import Workload, volume

FLOOR = "copy"
_EXPLAINED = (
    "Times of the slowest rank, iteration by iteration. GB/s per rank: wire counts the rows that "
    "leave it, once per destination rank; rows also those that stay. x copy: p50 over that of "
    "copy, in which all ranks at once copy as many bytes as cross the wire ({where})."
)
_WHERE = {"cpu": "within their own memory", "cuda": "to the next GPU, by its copy engine"}


@dataclasses.dataclass(frozen=True)
class Row:
    """One operation. Seconds; GB/s are 0 where an operation moves no rows."""

    operation: str
    p50: float
    p99: float
    wire_gb_per_s: float
    rows_gb_per_s: float
    floor_ratio: float  # p50 over that of the floor; 0 for the floor itself


def percentile(values: list[float], fraction: float) -> float:
    """The smallest value that at least this share of the values does not exceed."""
    return sorted(values)[max(math.ceil(fraction * len(values)), 1) - 1]


def slowest(times: list[list[float]]) -> list[float]:
    """The slowest rank's time of every iteration; times[rank][iteration]."""
    return [max(iteration) for iteration in zip(*times, strict=True)]


@dataclasses.dataclass(frozen=True)
class Report:
    """A benchmark's rows and all that is needed to judge them."""

    workload: Workload
    versions: dict[str, str]
    doubts: list[str]
    wire_bytes: float  # mean over the ranks
    rows_bytes: float
    rows: list[Row]


def make_report(workload: Workload, results: list[dict[str, Any]]) -> Report:
    """From what the ranks returned: {"times": {operation: [seconds]}, "versions": ...} each."""
    counts = volume(workload)
    wire = sum(counts.wire_rows) / workload.ranks * workload.row_bytes
    everything = sum(counts.all_rows) / workload.ranks * workload.row_bytes
    per_operation = {
        name: slowest([result["times"][name] for result in results]) for name in results[0]["times"]
    }
    floor = percentile(per_operation[FLOOR], 0.5)
    rows = []
    for name, times in per_operation.items():
        p50 = percentile(times, 0.5)
        moves = name != "prepare"
        rows.append(
            Row(
                name,
                p50,
                percentile(times, 0.99),
                moves * wire / p50 * 1e-9,
                (moves and name != FLOOR) * everything / p50 * 1e-9,
                0 if name == FLOOR else p50 / floor,
            )
        )
    versions = {"crossdock": crossdock.__version__} | results[0]["versions"]
    return Report(
        workload, versions, _host.doubts(workload.ranks, workload.device), wire, everything, rows
    )


def show_head(title: str, versions: dict[str, str], doubts: list[str]) -> None:
    """Prints all that is needed to judge a table."""
    _console.paragraph(title)
    _console.fact("machine", _host.processor())
    _console.fact("versions", ", ".join(f"{name} {text}" for name, text in versions.items()))
    for doubt in doubts:
        _console.fact("DOUBT", doubt)


def show(report: Report) -> None:
    """Prints the table."""
    show_head(report.workload.title(), report.versions, report.doubts)
    sent, all_rows = report.wire_bytes * 1e-6, report.rows_bytes * 1e-6
    said = f"a rank sends {sent:.2f} MB to others (with its own: {all_rows:.2f} MB)"
    _console.fact("volume", said)
    print()
    header = ("operation", "p50 us", "p99 us", "wire GB/s", "rows GB/s", "x copy")
    _console.table(header, [_cells(row) for row in report.rows], right=5)
    print()
    _console.paragraph(_EXPLAINED.format(where=_WHERE[report.workload.device]))


def _cells(row: Row) -> tuple[str, ...]:
    speeds = (row.wire_gb_per_s, row.rows_gb_per_s, row.floor_ratio)
    return (
        row.operation,
        f"{row.p50 * 1e6:.1f}",
        f"{row.p99 * 1e6:.1f}",
        *(f"{value:.2f}" if value else "-" for value in speeds),
    )


def as_json(report: Report) -> dict[str, Any]:
    """All of it; times in microseconds."""
    rows = [
        {
            "operation": row.operation,
            "p50_us": row.p50 * 1e6,
            "p99_us": row.p99 * 1e6,
            "wire_gb_per_s": row.wire_gb_per_s,
            "rows_gb_per_s": row.rows_gb_per_s,
            "floor_ratio": row.floor_ratio,
        }
        for row in report.rows
    ]
    return {
        "title": report.workload.title(),
        "machine": _host.processor(),
        "versions": report.versions,
        "doubts": report.doubts,
        "workload": dataclasses.asdict(report.workload),
        "wire_bytes": report.wire_bytes,
        "rows_bytes": report.rows_bytes,
        "rows": rows,
    }


def write_json(content: dict[str, Any], path: pathlib.Path) -> None:
    """Writes one JSON object with a line for each field, and in a list of rows for each row."""
    fields = []
    for name, value in content.items():
        text = json.dumps(value)
        if isinstance(value, list) and value and isinstance(value[0], dict):
            text = "[\n" + ",\n".join(map(json.dumps, value)) + "\n]"
        fields.append(f"{json.dumps(name)}: {text}")
    try:
        path.write_text("{\n" + ",\n".join(fields) + "\n}\n")
    except OSError as error:
        raise CommandError(f"--json {path}: {error.strerror}") from None


@contextlib.contextmanager
def figure(path: pathlib.Path, title: str, height: float) -> Iterator[Any]:
    """Axes to draw on, which are written to `path` afterwards. Needs matplotlib."""
    with panels(path, 1, height) as (axes,):
        yield axes
        axes.set_title(title.replace(", ", ",\n", 1), fontsize=9)
        axes.legend(fontsize=8)


@contextlib.contextmanager
def panels(path: pathlib.Path, count: int, height: float) -> Iterator[list[Any]]:
    """Axes beside one another, which are written to `path` afterwards. Needs matplotlib."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from crossdock import plot

    width = 8 if count == 1 else 6 * count
    whole, axes = plt.subplots(1, count, figsize=(width, height), squeeze=False)
    try:
        yield list(axes[0])
        whole.tight_layout()
        plot.save(whole, path)
    except OSError as error:
        raise CommandError(f"--plot {path}: {error.strerror}") from None
    finally:
        plt.close(whole)


def draw(report: Report, path: pathlib.Path) -> None:
    """Draws p50 and p99 of every operation beside the floor."""
    rows = [row for row in report.rows if row.operation != FLOOR]
    floor = next(row for row in report.rows if row.operation == FLOOR)
    names = [row.operation for row in rows]
    with figure(path, report.workload.title(), 0.6 * len(rows) + 2) as axes:
        axes.barh(names, [row.p50 * 1e6 for row in rows], color="tab:blue", label="p50")
        axes.plot(
            [row.p99 * 1e6 for row in rows], names, "|", color="black", markersize=14, label="p99"
        )
        axes.axvline(floor.p50 * 1e6, color="tab:orange", linestyle="--", label="copy, p50")
        axes.invert_yaxis()
        axes.set_xlabel("microseconds, slowest rank")
        axes.grid(axis="x", alpha=0.3)
