"""The commands on all GPUs of this machine."""

from __future__ import annotations

import json
import pathlib
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

COMMAND = [sys.executable, "-m", "crossdock.cli"]


def run(*arguments: str) -> str:
    """Runs the command and returns its output."""
    ended = subprocess.run(
        [*COMMAND, *arguments], capture_output=True, text=True, timeout=200, check=False
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def test_doctor_lets_gpus_exchange_tokens():
    text = run("doctor")
    assert "Crossdock can run here on: cpu, cuda" in text
    assert "compute capability" in text


@pytest.mark.parametrize("layout", ["expert_major", "rank_major"])
def test_bench_measures_on_all_gpus(tmp_path: pathlib.Path, layout: str):
    path = tmp_path / "ep.json"
    text = run(
        "bench",
        "ep",
        "--device",
        "cuda",
        "--layout",
        layout,
        "--tokens",
        "512",
        "--iters",
        "10",
        "--json",
        str(path),
    )
    report = json.loads(path.read_text())
    assert "GPU" in report["versions"]
    for row in report["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert f"\n{row['operation']} " in text


def test_bench_measures_low_latency_on_all_gpus(tmp_path: pathlib.Path):
    path = tmp_path / "ll.json"
    options = ("--tokens", "1,64", "--iters", "10", "--json", str(path))
    text = run("bench", "ll", "--device", "cuda", *options)
    report = json.loads(path.read_text())
    assert "GPU" in report["versions"]
    assert len(report["rows"]) == 2 * 12
    for row in report["rows"]:
        assert 0 < row["p50_us"] <= row["p99_us"]
        assert row["clock"] == "events"
        assert f"\n{row['operation']} " in text
