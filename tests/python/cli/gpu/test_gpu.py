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
    options = f"--device cuda --layout {layout} --tokens 512 --iters 10 --json"
    text = run("bench", "ep", *options.split(), str(path))
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


STEPS = """
import torch
import crossdock.torch as xd

with xd.init(device="cuda:0") as comm:
    sizes = {"num_experts": 4, "max_topk": 2, "max_tokens_per_rank": 64, "hidden": 256}
    group = xd.EpGroup(comm=comm, dtype=torch.float32, **sizes)
    tokens = torch.ones(64, 256, device="cuda")
    idx = torch.tensor([[0, 1]], device="cuda").expand(64, 2).contiguous()
    for _ in range(300):
        plan = group.prepare(idx)
        received = xd.dispatch(plan, tokens, torch.ones(64, 2, device="cuda"))
        torch.cuda._sleep(200_000)
        xd.combine(plan, received.tokens, received.weights)
    torch.cuda.synchronize()
    group.check()
"""


def test_trace_shows_when_operations_run(tmp_path: pathlib.Path):
    path = tmp_path / "trace.json"
    run("trace", "--device", "-o", str(path), "--", sys.executable, "-c", STEPS)
    events = json.loads(path.read_text())["traceEvents"]
    titles = {
        event["args"]["name"]: event["tid"] for event in events if event["name"] == "thread_name"
    }
    lines = {
        where: [event for event in events if event["ph"] == "X" and event["tid"] == titles[title]]
        for title in titles
        for where in ("device" if title.endswith("on the device") else "host",)
    }
    # The host may be ahead by more than there are events; what is shown is in order.
    assert len(lines["host"]) == 900 and len(lines["device"]) >= 200
    end = 0.0
    for span in lines["device"]:
        assert span["name"] in {"prepare", "dispatch", "combine"}
        assert 0 < span["dur"] < 10_000 and span["ts"] >= end - 0.01
        end = span["ts"] + span["dur"]
    enqueued = {span["name"]: span["ts"] for span in reversed(lines["host"])}
    first = {span["name"]: span["ts"] for span in reversed(lines["device"])}
    assert all(first[name] >= enqueued[name] for name in first)
