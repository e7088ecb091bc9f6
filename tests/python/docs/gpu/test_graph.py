"""The example of the documentation that needs a GPU per rank."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[4] / "examples/python"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "program, said",
    [
        ("torch_graph.py", "replays agree"),
        ("torch_round_trip.py", "sums as expected"),
        ("torch_compile.py", "gradients agree"),
    ],
)
def test_example(program: str, said: str):
    ranks = torch.cuda.device_count()
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--nproc-per-node",
            str(ranks),
            str(EXAMPLES / program),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(said) == ranks


@pytest.mark.gpu
@pytest.mark.parametrize("arguments", [[], ["--graph"]], ids=" ".join)
def test_decode_moe(arguments: list[str]):
    ranks = torch.cuda.device_count()
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)),
            *(str(EXAMPLES.parent / "torch/decode_moe.py"), *arguments),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("steps agree with one process") == ranks
