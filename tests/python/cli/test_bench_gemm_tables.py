"""bench/gemm/tables.py: the tables that it makes of measured times, and what it finds of AUTO."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

SCRIPT = pathlib.Path(__file__).resolve().parents[3] / "bench" / "gemm" / "tables.py"
COST = {"memory_bytes": 5_000_000, "overlap": 0.875, "host_us": 4.25}


def ways(auto: float, takes: str) -> dict[str, dict[str, object]]:
    """Times of each way; AUTO's graph takes ``auto``."""
    return {
        "product alone": {"p50_us": 50.0},
        "one after the other": {"p50_us": 110.0},
        "AUTO": {"p50_us": 400.0, "algo": takes, **COST},
        "AUTO, graph": {"p50_us": auto, "algo": takes, **COST, "host_us": 1.5},
        "SEQUENTIAL": {"p50_us": 300.0, "algo": "SEQUENTIAL"},
        "SEQUENTIAL, graph": {"p50_us": 100.0, "algo": "SEQUENTIAL"},
        "DIRECT": {"p50_us": 80.0, "algo": "DIRECT"},
    }


def tables(folder: pathlib.Path, *options: str, **points: dict[str, dict[str, object]]):
    """The script's tables of these layers, and its exit code."""
    path = folder / "gemm.json"
    rows = [
        {"shape": layer, "tokens": 64, "way": way, "p99_us": 120.0, **numbers}
        for layer, measured in points.items()
        for way, numbers in measured.items()
    ]
    path.write_text(json.dumps({"title": "a run", "build": "a commit", "gpus": [], "rows": rows}))
    ended = subprocess.run(
        [sys.executable, SCRIPT, path, *options], capture_output=True, text=True, check=False
    )
    assert ended.stderr == ""
    return ended.stdout.splitlines(), ended.returncode


def test_graphs_count_before_calls_and_ways_that_are_not_there_leave_gaps(tmp_path):
    lines, code = tables(tmp_path, "--aims", fc1=ways(82.0, "DIRECT"))
    assert code == 0
    assert lines[0] == "a run; a commit"
    assert lines[2].split(" | ")[2:] == (
        "product alone | NCCL and product | SEQUENTIAL | DIRECT | best / product alone |".split(
            " | "
        )
    )
    assert lines[4] == "| `fc1` | 64 | 50.0 | 110 | 100 | 80.0 | 1.60 |"
    cells = "DIRECT | 82.0 | 120 | 1.02 | 1.64 | 0.88 | 4.2 | 1.5 | 5"
    assert lines[8] == f"| `fc1` | 64 | {cells} |"
    assert lines[-1] == "AUTO misses its aims 0 times, at 1 points."


@pytest.mark.parametrize(
    "auto, takes, misses",
    [
        (82.5, "DIRECT", ["1.031 times as long as DIRECT"]),
        (101.0, "SEQUENTIAL", ["1.262 times as long as DIRECT"]),
        (
            111.0,
            "SPLIT",
            [
                "1.387 times as long as DIRECT",
                "1.009 times as long as one after the other",
                "1.110 times as long as SEQUENTIAL",
            ],
        ),
    ],
)
def test_points_at_which_auto_is_too_slow_are_named(tmp_path, auto, takes, misses):
    points = {"fc1": ways(80.0, "DIRECT"), "fc2": ways(auto, takes)}
    lines, code = tables(tmp_path, **points)
    assert code == 0
    found = [line for line in lines if line.startswith("AUTO, ")]
    assert found == [f"AUTO, fc2, M = 64: {miss}" for miss in misses]
    assert tables(tmp_path, "--aims", **points)[1] == 1
