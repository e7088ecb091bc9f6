"""The results of ``crossdock bench ll``: a table per number of tokens, JSON, a plot."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import crossdock
from crossdock.cli import _console, _host, _ll_steps, _report
from crossdock.cli._ll_steps import LOW_LATENCY, Step
from crossdock.cli._workload import Workload

_ALL_OF = {"dispatch + combine": "prepare + dispatch + combine"}
_CLOCKS = {"cpu": "call", "cuda": "events"}
_EXPLAINED = (
    "Times of the slowest rank, iteration by iteration; all steps take turns in several rounds. "
    "zero-copy: by calls of the expert-major layout on tensors in symmetric memory; x zero-copy: "
    "p50 of those that do the same, over this one. Checked before: every element of a round trip "
    "by each."
)


@dataclasses.dataclass(frozen=True)
class Case:
    """The steps of one number of tokens: seconds of every iteration, of the slowest rank."""

    workload: Workload
    times: dict[Step, list[float]]

    def median(self, step: Step) -> float:
        return _report.percentile(self.times[step], 0.5)

    def zero_copy_ratio(self, step: Step) -> float:
        """The p50 of what the expert-major layout takes for the same, over this; 0 = nothing."""
        same = _ALL_OF.get(step.operation, step.operation)
        for other in self.times:
            if step.by == LOW_LATENCY != other.by and other.operation == same:
                return self.median(other) / self.median(step)
        return 0

    def group_bytes(self) -> int:
        """Bytes that a low-latency group takes of a rank."""
        config = _ll_steps.config(self.workload)
        memory = config.group_memory(self.workload.ranks, self.workload.device)
        return memory.symmetric_bytes + memory.private_bytes


@dataclasses.dataclass(frozen=True)
class Report:
    """All cases, and all that is needed to judge them."""

    versions: dict[str, str]
    doubts: list[str]
    cases: list[Case]

    @property
    def workload(self) -> Workload:
        """One of the cases, which differ in the number of tokens."""
        return self.cases[-1].workload


def make_report(workloads: list[Workload], results: list[dict[str, Any]]) -> Report:
    """From what the ranks returned: {"times": of each workload, "versions": ...} each."""
    cases = []
    for number, workload in enumerate(workloads):
        times = [result["times"][number] for result in results]
        slowest = {step: _report.slowest([mine[step] for mine in times]) for step in times[0]}
        cases.append(Case(workload, slowest))
    versions = {"crossdock": crossdock.__version__} | results[0]["versions"]
    return Report(versions, _host.doubts(workloads[0].ranks, workloads[0].device), cases)


def show(report: Report) -> None:
    """Prints the tables."""
    _report.show_head(report.workload.low_latency_title(), report.versions, report.doubts)
    header = ("operation", "by", "rows", "p50 us", "p99 us", "x zero-copy")
    clock = _CLOCKS[report.workload.device]
    for case in report.cases:
        print(
            f"\n{case.workload.tokens} tokens per rank; "
            f"a group takes {case.group_bytes() * 1e-6:.1f} MB per rank; times by {clock}"
        )
        _console.table(header, [_cells(row) for row in _rows(case)], right=3)
    print()
    _console.paragraph(_EXPLAINED)


def _rows(case: Case) -> list[dict[str, Any]]:
    """With the fields of crossdock-bench ll."""
    rows = []
    for step, times in case.times.items():
        row = {
            "tokens": case.workload.tokens,
            **step._asdict(),
            "clock": _CLOCKS[case.workload.device],
            "p50_us": case.median(step) * 1e6,
            "p99_us": _report.percentile(times, 0.99) * 1e6,
        }
        ratio = case.zero_copy_ratio(step)
        rows.append(row | ({"zero_copy_ratio": ratio} if ratio else {}))
    return rows


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        row["operation"],
        row["by"].removeprefix("expert-major, "),
        row["rows"],
        f"{row['p50_us']:.1f}",
        f"{row['p99_us']:.1f}",
        f"{row['zero_copy_ratio']:.2f}" if "zero_copy_ratio" in row else "-",
    )


def as_json(report: Report) -> dict[str, Any]:
    """All of it; times in microseconds."""
    workload = dataclasses.asdict(report.workload)
    del workload["layout"]
    return {
        "title": report.workload.low_latency_title(),
        "machine": _host.processor(),
        "versions": report.versions,
        "doubts": report.doubts,
        "workload": workload | {"tokens": [case.workload.tokens for case in report.cases]},
        "rows": [row for case in report.cases for row in _rows(case)],
    }


def draw(report: Report, path: pathlib.Path) -> None:
    """Draws the p50 of every whole operation against the number of tokens."""
    tokens = [case.workload.tokens for case in report.cases]
    with _report.figure(path, report.workload.low_latency_title(), 5) as axes:
        for step in report.cases[0].times:
            if "half" in step.operation or "halves" in step.operation:
                continue
            axes.plot(
                tokens,
                [case.median(step) * 1e6 for case in report.cases],
                "o-" if step.by == LOW_LATENCY else "s--",
                label=f"{step.operation}, {step.rows}, {step.by}",
            )
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xlabel("tokens of each rank")
        axes.set_ylabel("microseconds, slowest rank")
        axes.grid(alpha=0.3)
