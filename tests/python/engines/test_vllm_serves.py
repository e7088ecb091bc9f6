"""A whole model served by vLLM on ranks of the CPU: equal tokens with and without Crossdock."""

from __future__ import annotations

import importlib.machinery
import importlib.util
import pathlib
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

import crossdock
from crossdock._stats import seen_groups
from engines import PATHS, needs, write_distribution
from served import Page, environment, run, server, ways_agree

pytestmark = [
    needs("vllm"),
    pytest.mark.skipif(
        importlib.util.find_spec("transformers") is None, reason="it makes the model"
    ),
]


_OF_A_SERVER = (
    "model_hosting_container_standards",
    "prometheus_fastapi_instrumentator",
    "uvicorn",
    "uvloop",
    "watchfiles",
)
_COUNT = 64  # tokens of the model: after each comes the next one


def _on_cpu(folder: pathlib.Path) -> dict[str, str]:
    """Variables by which vLLM finds Crossdock's plug-in, and its platform for CPUs."""
    entry = "vllm.platform_plugins", "vllm_on_cpu", "vllm_on_cpu:platform"
    write_distribution(folder, "vllm_on_cpu", entry=entry)
    return environment(folder, str(pathlib.Path(__file__).parent)) | {
        "VLLM_USE_V2_MODEL_RUNNER": "0",  # the other one is kernels of Triton
        "VLLM_CPU_SIM_MULTI_NUMA": "1",  # ranks may share the memory of one socket
    }


def test_tokens_are_the_same_with_and_without_crossdock(tmp_path: pathlib.Path) -> None:
    """In ways of each kind; compare_vllm.py fails one that had no calls of Crossdock."""
    ways = ("allgather_reducescatter", "1:deepep_v2", "deep_ep:deepep_low_latency")
    ways_agree(tmp_path, _on_cpu(tmp_path), ways, "--tokens", "8")


@pytest.mark.skipif(
    not all(
        importlib.machinery.PathFinder.find_spec(name, [*PATHS, *sys.path]) for name in _OF_A_SERVER
    ),
    reason=f"a server of vLLM imports {', '.join(_OF_A_SERVER)}",
)
def test_a_server_answers_as_the_page_says(tmp_path: pathlib.Path) -> None:
    """The commands of docs/vllm.md, without graphs; and 16 requests at once."""
    page = Page("vllm.md")
    variables = _on_cpu(tmp_path) | page.variables
    assert page.words[0] == "vllm"
    run(tmp_path, variables, "tiny_moe.py", "tiny")
    # For time and memory: no graphs, and a small cache.
    words = [*page.words[1:], "--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20)]
    with server(tmp_path, variables, "vllm.entrypoints.cli.main", words) as vllm:

        def tokens(body: dict[str, Any]) -> Any:
            return vllm.ask(page.path, body)["choices"][0]["token_ids"]

        def count_from(first: int) -> Any:
            return tokens(
                {
                    "token_ids": [first],
                    "sampling_params": {"temperature": 0, "max_tokens": 16},
                }
            )

        vllm.wait()
        assert tokens(page.body) == [6, 7, 8, 9]
        with ThreadPoolExecutor(8) as pool:
            made = list(pool.map(count_from, range(0, _COUNT, 4)))
        assert made == [
            [(first + step) % _COUNT for step in range(1, 17)] for first in range(0, _COUNT, 4)
        ]
        groups = seen_groups(vllm.processes())
        assert {group.rank for group in groups if group.stats.calls} == {0, 1}, groups
        text = vllm.text()
        assert (
            f"crossdock {crossdock.__version__} has classes of its own for deepep_high_throughput"
            in text
        )
        assert text.count("Using CrossdockStandard") == 2, text
        assert vllm.end() == []
