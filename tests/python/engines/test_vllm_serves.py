"""A whole model served by vLLM on ranks of the CPU: equal tokens with and without Crossdock."""

from __future__ import annotations

import importlib.util
import os
import pathlib
import subprocess
import sys

import pytest

from engines import PATHS, installed, needs

HERE = pathlib.Path(__file__).parent
SERVING = HERE.parents[2] / "examples" / "serving"
SECONDS = 900  # of imports, in ten processes

pytestmark = [
    needs("vllm"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="it makes the model"
    ),
]


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables by which vLLM finds both plug-ins: its platform for the CPU, and Crossdock's."""
    folder = tmp_path_factory.mktemp("plugins")
    own = folder / "vllm_on_cpu-0.dist-info"
    own.mkdir()
    (own / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm_on_cpu\nVersion: 0\n")
    (own / "entry_points.txt").write_text(
        "[vllm.platform_plugins]\nvllm_on_cpu = vllm_on_cpu:platform\n"
    )
    paths = [installed(folder, "vllm.general_plugins"), str(HERE), *PATHS, *sys.path]
    return os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one is kernels of Triton
        "VLLM_CPU_SIM_MULTI_NUMA": "1",  # ranks may share the memory of one socket
        "VLLM_DEEPEP_BUFFER_SIZE_MB": "16",
        "VLLM_NO_USAGE_STATS": "1",
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }


def test_tokens_are_the_same_with_and_without_crossdock(
    environment: dict[str, str], tmp_path: pathlib.Path
) -> None:
    """In one way of each kind; compare_vllm.py says which calls of Crossdock there were."""
    for words in (
        ["tiny_moe.py", "tiny"],
        [
            "compare_vllm.py",
            *("tiny", "--tokens", "8", "--logs", "logs", "--timeout", str(SECONDS)),
            *("--ways", "allgather_reducescatter", "1:deepep_v2", "deep_ep:deepep_low_latency"),
        ],
    ):
        done = subprocess.run(
            [sys.executable, SERVING / words[0], *words[1:]],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS + 60,
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "3 of 3 ways gave the tokens" in done.stdout, done.stdout
