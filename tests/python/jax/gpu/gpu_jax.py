"""Settings that the cases of the CPU need to run on GPUs: imported before JAX is."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import pathlib
import sys
from collections.abc import Callable
from typing import Any

import pytest


def gpus() -> int:
    """GPUs of this host, counted without JAX, which would take their memory."""
    count = ctypes.c_int()
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return 0
    driver.cuInit(0)
    driver.cuDeviceGetCount(ctypes.byref(count))
    return count.value


# For this process's children; before jax_support is imported.
if gpus() > 1:
    os.environ["XD_JAX_GPUS"] = str(4 if gpus() >= 4 else 2)
    os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, range(int(os.environ["XD_JAX_GPUS"]))))
    os.environ["JAX_PLATFORMS"] = "cuda"
    os.environ["XLA_PYTHON_CLIENT_MEM_FRACTION"] = "0.1"
    os.environ["XD_GEMM_TUNE"] = "0"  # contexts of tests are many, and do not live long
    os.environ["XLA_FLAGS"] = (
        "--xla_gpu_enable_command_buffer=FUSION,CUBLAS,CUSTOM_CALL --xla_gpu_graph_min_graph_size=1"
    )

sys.path.insert(0, str(pathlib.Path(__file__).parents[1]))
pytest.importorskip("crossdock.jax", exc_type=ImportError)

import jax  # noqa: E402

from jax_support import World  # noqa: E402

_jax_for_cuda = any(importlib.util.find_spec(f"jax_cuda{version}_plugin") for version in (12, 13))
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(gpus() < 2, reason="needs two GPUs"),
    pytest.mark.skipif(not _jax_for_cuda, reason="needs JAX for CUDA: pip install 'jax[cuda13]'"),
]


def elsewhere(world: World, test: Callable[..., None], *args: Any) -> None:
    """A test that makes ranks of its own, in a process that may take GPUs."""
    world.ep.close()
    with jax.default_matmul_precision("float32"):  # not TF32, in what is compared with
        test(*args)
