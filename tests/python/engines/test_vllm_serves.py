"""A whole model served by vLLM on ranks of the CPU: equal tokens with and without Crossdock."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from engines import needs
from served import environment, ways_agree

pytestmark = [
    needs("vllm"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="it makes the model"
    ),
]


def test_tokens_are_the_same_with_and_without_crossdock(tmp_path: pathlib.Path) -> None:
    """In ways of each kind; compare_vllm.py fails one that had no calls of Crossdock."""
    platform = tmp_path / "vllm_on_cpu-0.dist-info"
    platform.mkdir()
    (platform / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_on_cpu\nVersion: 0\n")
    (platform / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nvllm_on_cpu = vllm_on_cpu:platform\n"
    )
    variables = environment(tmp_path, str(pathlib.Path(__file__).parent)) | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one is kernels of Triton
        "VLLM_CPU_SIM_MULTI_NUMA": "1",  # ranks may share the memory of one socket
    }
    ways = ("allgather_reducescatter", "1:deepep_v2", "deep_ep:deepep_low_latency")
    ways_agree(tmp_path, variables, ways, "--tokens", "8")
