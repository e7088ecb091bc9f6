"""Training over GPUs with JAX is what one device without Crossdock does."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from gpu_jax import MARKS  # isort: skip (before JAX is imported)

import test_train as train
from jax_support import RANKS

pytestmark = MARKS


@pytest.mark.parametrize(
    "where",
    [[], ["--processes"], ["--tensor-parallel"], ["--tensor-parallel", "--processes"]],
    ids=["devices", "processes", "devices-product", "processes-product"],
)
def test_training_agrees_with_one_device(where, tmp_path):
    options = f"--check --device gpu --data 1 --experts-axis {RANKS} --folder {tmp_path}".split()
    command = [str(train.EXAMPLES / "train_moe.py"), *options, *train.SMALL, *where]
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    ended = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
        env=environment,
    )
    text = ended.stdout + ended.stderr
    assert ended.returncode == 0 and " agrees" in text and "DISAGREES" not in text, text
