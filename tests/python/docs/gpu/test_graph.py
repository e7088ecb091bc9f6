"""The example of the documentation that needs a GPU per rank."""

from __future__ import annotations

import pathlib
import subprocess
import sys

import pytest
import torch

EXAMPLES = pathlib.Path(__file__).resolve().parents[4] / "examples"


@pytest.mark.gpu
@pytest.mark.parametrize(
    "program, arguments, said",
    [
        ("python/torch_graph.py", [], "replays agree"),
        ("python/torch_round_trip.py", [], "sums as expected"),
        ("python/torch_compile.py", [], "gradients agree"),
        ("torch/decode_moe.py", [], "steps agree with one process"),
        ("torch/decode_moe.py", ["--graph"], "steps agree with one process"),
    ],
    ids=str,
)
def test_example(program: str, arguments: list[str], said: str):
    ranks = torch.cuda.device_count()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    ended = subprocess.run(
        [*torchrun, str(EXAMPLES / program), *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count(said) == ranks
