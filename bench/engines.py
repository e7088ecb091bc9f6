#!/usr/bin/env python3
"""Times a decode layer of an engine on Crossdock: rung A, its own classes, beside rung B, ours.

  PYTHONPATH=build/python engines.py [--engine vllm|sglang] [--ranks 2] [--tokens 1,16,128] [--fp8]

The engine must be installed, or vLLM on PYTHONPATH, SGLang in XD_TEST_ENGINES. Rung A is what
XD_ENGINE=deep_ep makes of --all2all-backend deepep_low_latency (SGLang: --moe-a2a-backend deepep
--deepep-mode low_latency), rung B what XD_ENGINE=1 does. vLLM's modular kernel, SGLang's dispatcher
run the layer. Its experts hand back the rows that they get (with --fp8: the same results each
time), so a step is dispatch, combine and all that these do around them on the host. The rungs take
turns on the same batches. A figure is the time of one of many steps in a row, eager ones, on GPUs
also replays of a CUDA graph of one step; of the slowest rank, p50 over the rounds. Results are
compared with their expected values, before and after.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import importlib
import json
import os
import statistics
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from crossdock import launch, vllm as plugin

LAYERS = "vllm.model_executor.layers.fused_moe"
MANAGERS = "vllm.distributed.device_communicators.all2all"
SCALE_BLOCK = 128  # columns of fp8 rows that share a scale
RUNGS = {"A": plugin.register_deep_ep, "B": plugin.register}  # in this order in one process


def parse() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--engine", default="vllm", choices=("vllm", "sglang"))
    parser.add_argument("--device", default="cuda" if gpus else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=gpus or 2)
    parser.add_argument("--tokens", default="1,16,128", help="of each rank, comma-separated")
    parser.add_argument("--hidden", type=int, help="a size that DeepEP takes; 7168, CPU: 2048")
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8, help="a power of two")
    parser.add_argument("--fp8", action="store_true", help="rows travel as fp8 to experts")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--steps", type=int, default=50, help="in a row, in each round")
    parser.add_argument("--json", help="file for one object per line")
    options = parser.parse_args()
    options.tokens = [int(text) for text in options.tokens.split(",")]
    options.hidden = options.hidden or (7168 if options.device == "cuda" else 2048)
    if options.device == "cuda" and not 1 <= options.ranks <= gpus:
        parser.error(f"--ranks: expected 1 to {gpus}, the number of GPUs, got {options.ranks}")
    if options.experts % options.ranks:
        parser.error(f"--experts: expected a multiple of --ranks, got {options.experts}")
    if options.topk < 1 or options.topk & (options.topk - 1) or options.topk > options.experts:
        parser.error(f"--topk: expected a power of two up to --experts, got {options.topk}")
    return options


class Experts:
    """Experts in slots, which hand back their rows.

    Attributes:
        known: [L,S,H] bfloat16 results of fp8 rows, that are to be given; None = make them.
    """

    known: torch.Tensor | None = None

    def __call__(self, rows: torch.Tensor, scales: torch.Tensor | None) -> torch.Tensor:
        if scales is None:
            return rows
        if self.known is None:
            blocks = rows.float().unflatten(-1, (-1, SCALE_BLOCK)) * scales.unsqueeze(-1)
            self.known = blocks.flatten(-2).bfloat16()
        return self.known


class VllmExperts(Experts):
    """The same as vLLM's kernel asks for them."""

    expects_unquantized_inputs = False

    def __init__(self, options: argparse.Namespace) -> None:
        config = importlib.import_module(f"{LAYERS}.config")
        reduce = importlib.import_module(f"{LAYERS}.topk_weight_and_reduce")
        self.quant_config = config.FUSED_MOE_UNQUANTIZED_CONFIG
        if options.fp8:
            scale = torch.ones(options.experts // options.ranks, 1, 1, device=options.device)
            block = [SCALE_BLOCK, SCALE_BLOCK]
            self.quant_config = config.fp8_w8a8_moe_quant_config(scale, scale, block_shape=block)
        self.finalize_weight_and_reduce_impl = reduce.TopKWeightAndReduceDelegate

    def output_hidden_dim(self, hidden: int) -> int:
        return hidden


class Batch:
    """A rank's tokens, which experts that hand back their rows make themselves again, exactly.

    Attributes:
        x: [T,H] bfloat16, small integers, and the largest e4m3 in each block, so its scale is 1.
        ids, ids32, weights: [T,K] int64 experts, the same as int32, and 1/K.
    """

    def __init__(self, options: argparse.Namespace, tokens: int, rank: int) -> None:
        draw = torch.Generator().manual_seed(rank)
        x = torch.randint(-8, 9, (tokens, options.hidden), generator=draw).bfloat16()
        x[:, ::SCALE_BLOCK] = 448
        scores = torch.rand(tokens, options.experts, generator=draw)
        self.x = x.to(options.device)
        self.ids = scores.topk(options.topk, dim=1).indices.to(options.device)
        self.ids32 = self.ids.int()
        self.weights = torch.full(self.ids.shape, 1 / options.topk, device=options.device)


class Vllm:
    """A layer as vLLM makes it once a rung's plug-in is registered."""

    def __init__(self, options: argparse.Namespace) -> None:
        modular: Any = importlib.import_module(f"{LAYERS}.modular_kernel")
        base: Any = modular.FusedMoEKernelModularImpl

        class Kernel(base):
            def __init__(self, prepare_finalize: Any, experts: Experts) -> None:
                self.prepare_finalize, self.fused_experts = prepare_finalize, experts

            def _fused_experts(
                self, *, a1q: torch.Tensor, a1q_scale: torch.Tensor | None, **_: Any
            ) -> torch.Tensor:
                return self.fused_experts(a1q, a1q_scale)

        most, local = max(options.tokens), options.experts // options.ranks
        self.options = options
        self.manager = importlib.import_module(MANAGERS).DeepEPLLAll2AllManager(dist.group.WORLD)
        sizes = {
            "max_num_tokens_per_dp_rank": most,
            "token_hidden_size": options.hidden,
            "num_ep_ranks": options.ranks,
            "num_global_experts": options.experts,
            "num_local_experts": local,
        }
        found = importlib.import_module(f"{LAYERS}.prepare_finalize.deepep_ll")
        prepare_finalize = found.DeepEPLLPrepareAndFinalize(
            self.manager.get_handle(sizes),
            max_tokens_per_rank=most,
            num_dispatchers=options.ranks,
            use_fp8_dispatch=options.fp8,
        )
        self.experts = VllmExperts(options)
        self.kernel = Kernel(prepare_finalize, self.experts)
        self.weights = torch.empty(local, 1, 1, device=options.device)  # the kernel counts experts

    def step(self, batch: Batch) -> torch.Tensor:
        return self.kernel.apply(
            batch.x,
            self.weights,
            self.weights,
            batch.ids,
            batch.weights,
            global_num_experts=self.options.experts,
        )


def check(layer: Any, batch: Batch) -> None:
    """Ends a rank whose step of a layer does not give its rows back."""
    layer.experts.known = None
    if not torch.equal(layer.step(batch), batch.x):
        raise SystemExit(f"rank {dist.get_rank()}: wrong result")


def graph_of(layer: Any, batch: Batch) -> torch.cuda.CUDAGraph:
    """One step, whose result its first replay has to write."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        out = layer.step(batch)
    out.fill_(torch.nan)
    graph.replay()
    if not torch.equal(out, batch.x):
        raise SystemExit(f"rank {dist.get_rank()}: wrong result of a graph")
    return graph


@contextlib.contextmanager
def served(options: argparse.Namespace, rank: int) -> Iterator[None]:
    """Has vLLM's managers find what a worker's set-up tells them."""
    config = SimpleNamespace(
        parallel_config=SimpleNamespace(
            all2all_backend="deepep_low_latency", enable_fault_tolerance=False
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=max(options.tokens)),
    )
    group = SimpleNamespace(rank_in_group=rank, world_size=options.ranks)
    state = "vllm.distributed.parallel_state"
    with contextlib.ExitStack() as stack:
        for name, value in {
            f"{state}.get_dp_group": group,
            f"{state}.get_tp_group": group,
            f"{state}.in_the_same_node_as": [True],
            f"{MANAGERS}.get_current_vllm_config": config,
            "crossdock.vllm._manager.get_current_vllm_config": config,
        }.items():
            stack.enter_context(mock.patch(name, return_value=value))
        yield


def microseconds(options: argparse.Namespace, step: Callable[[], object]) -> float:
    """Of a step in a row of them, on this rank."""
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.synchronize()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(options.steps):
        step()
    if cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - began) / options.steps * 1e6


def measure(
    options: argparse.Namespace, layers: dict[str, Any], tokens: int
) -> list[dict[str, object]]:
    """A row for eager steps of so many tokens, and on GPUs one for graphs."""
    batch = Batch(options, tokens, dist.get_rank())
    for layer in layers.values():
        check(layer, batch)
    ways: dict[str, dict[str, Callable[[], object]]] = {
        "eager": {name: functools.partial(one.step, batch) for name, one in layers.items()}
    }
    if options.device == "cuda":
        graphs = {name: graph_of(one, batch) for name, one in layers.items()}
        ways["graph"] = {name: one.replay for name, one in graphs.items()}
    found = []
    for way, steps in ways.items():
        mine: dict[str, list[float]] = {name: [] for name in steps}
        for _ in range(options.rounds + 1):  # the first warms up
            for name, step in steps.items():
                mine[name].append(microseconds(options, step))
        slowest = torch.tensor([times[1:] for times in mine.values()])
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
        p50 = [statistics.median(times) for times in slowest.tolist()]
        found.append({"tokens": tokens, "way": way, "a_us": p50[0], "b_us": p50[1]})
    for layer in layers.values():
        check(layer, batch)
    return found


def run_rank(rank: int, options: argparse.Namespace) -> None:
    if options.device == "cuda":
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    if options.engine == "vllm":
        made = vllm_layers(options, rank)
    else:
        made = importlib.import_module("sglang_layer").layers(options, rank, Experts)
    with made as layers:
        rows = [row for tokens in options.tokens for row in measure(options, layers, tokens)]
        if rank == 0:
            report(options, rows)


@contextlib.contextmanager
def vllm_layers(options: argparse.Namespace, rank: int) -> Iterator[dict[str, Vllm]]:
    """A layer of each rung, in torch's process group, which is begun here."""
    dist.init_process_group("gloo")
    layers = {}
    for name, register in RUNGS.items():
        register()
        importlib.import_module("crossdock.vllm._manager")
        with served(options, rank):
            layers[name] = Vllm(options)
    yield layers
    for layer in layers.values():
        layer.manager.destroy()
    dist.destroy_process_group()


def report(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    sizes = {
        key: getattr(options, key)
        for key in ("engine", "ranks", "hidden", "experts", "topk", "fp8")
    }
    device = torch.cuda.get_device_name() if options.device == "cuda" else "cpu"
    print(f"{device}, torch {torch.__version__}, {sizes}; microseconds of a step\n")
    print("| tokens of a rank | step | A | B | B / A |\n| ---: | --- | ---: | ---: | ---: |")
    for row in rows:
        a, b = row["a_us"], row["b_us"]
        print(f"| {row['tokens']} | {row['way']} | {a:.1f} | {b:.1f} | {b / a:.2f} |", flush=True)
    if options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            for row in rows:
                line = {"device": device, "torch": torch.__version__, **sizes, **row}
                file.write(json.dumps(line) + "\n")


def main() -> None:
    options = parse()
    os.environ.setdefault("XD_TIMEOUT_MS", "600000")  # a rank has thousands of files to import
    os.environ.setdefault("VLLM_DEEPEP_BUFFER_SIZE_MB", "1")
    launch.run(options.ranks, run_rank, options)


if __name__ == "__main__":
    main()
