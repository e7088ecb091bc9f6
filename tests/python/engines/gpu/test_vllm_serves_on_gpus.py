"""A whole model served by vLLM on two GPUs: equal tokens with and without Crossdock."""

from __future__ import annotations

import json
import pathlib

from engines import on_gpus_with
from served import environment, ways_agree

WAYS = ["allgather_reducescatter"] + [
    f"{engine}:deepep_{kind}"
    for engine in ("1", "deep_ep")
    for kind in ("high_throughput", "low_latency", "v2")
]
KERNELS = {
    "attention_backend": "TRITON_ATTN",
    "moe_backend": "triton",
    "distributed_executor_backend": "uni",
}

pytestmark = on_gpus_with("vllm")


def test_tokens_are_the_same_with_and_without_crossdock(tmp_path: pathlib.Path) -> None:
    options = json.dumps(KERNELS)
    ways_agree(tmp_path, environment(tmp_path), WAYS, "--together", "--engine-options", options)


def test_tokens_of_graphs_are_the_same(tmp_path: pathlib.Path) -> None:
    """Without those for high throughput: vLLM has no graphs with them."""
    graphs = {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}
    options = json.dumps(KERNELS | graphs)
    ways = [way for way in WAYS if not way.endswith("high_throughput")]
    words = ("--together", "--graphs", "--engine-options", options)
    ways_agree(tmp_path, environment(tmp_path), ways, *words)
