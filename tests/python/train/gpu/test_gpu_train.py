"""Training over the GPUs of this machine is what one GPU without Crossdock does."""

from __future__ import annotations

import pathlib

import pytest
import torch

from moe_lm.compare import compare
from moe_lm.trainer import PROMPT
from runs import run, small
from support import run_ranks

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tensor_parallel", [1, 2])
def test_losses_and_gradients_agree_with_one_gpu(
    tensor_parallel: int, tmp_path: pathlib.Path
) -> None:
    ranks = 4 if torch.cuda.device_count() >= 4 else min(torch.cuda.device_count(), 2)
    if tensor_parallel > ranks:
        pytest.skip("needs two GPUs")
    settings = small(tmp_path, device="cuda", save_first_step=True, sample_bytes=4)
    plain, spread = (settings.replace(folder=tmp_path / name) for name in ("plain", "spread"))
    run_ranks(1, run, plain.replace(plain=True), timeout=120)
    spread = spread.replace(tensor_parallel=tensor_parallel)
    outcomes = run_ranks(ranks, run, spread, timeout=120)
    checks = compare(plain.folder, spread.folder)
    assert all(check.holds for check in checks), checks
    assert len(outcomes[0].sample) == len(PROMPT) + settings.sample_bytes
