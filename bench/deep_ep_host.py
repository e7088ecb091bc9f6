#!/usr/bin/env python3
"""Times what a call of crossdock.deep_ep.Buffer takes on the host.

  PYTHONPATH=build/python deep_ep_host.py [--ranks 2] [--tokens 128] [--device cpu|cuda]

Each operation is called with nothing else under way ("returns": until the call is back, the slowest
rank's) and many times in a row ("in a row": the mean until the last is back). On GPUs "events" is
the time between two events on the caller's stream, around one call. On all, p50 of the iterations.
`functions` and `operators` count what one call asks of torch: its Python functions, as a
TorchFunctionMode sees them, and its operators. All of it is measured without and with
torch.set_default_device, which is such a mode.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from crossdock import launch
from crossdock.cli import _console
from crossdock.deep_ep import Buffer, Config

IN_A_ROW = 20


def parse() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if gpus else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=min(gpus, 2) or 2)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", type=int, default=24)
    parser.add_argument("--iterations", type=int, default=100)
    return parser.parse_args()


class Functions(TorchFunctionMode):
    """Counts the functions of torch that are called within it."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Operators(TorchDispatchMode):
    """Counts the operators that run within it."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


class Calls:
    """One rank's Buffer and batch, and the operations to time, by name."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        self.buffer = Buffer(dist.group.WORLD, low_latency_mode=True, explicitly_destroy=True)
        self.options, self.config = options, Config(options.sms)
        device = self.buffer._live().device
        self.cuda = device.type == "cuda"
        generator = torch.Generator(device).manual_seed(rank)
        shape, scales = (options.tokens, options.hidden), (options.tokens, options.hidden // 128)
        self.x = torch.randn(shape, device=device, generator=generator).bfloat16()
        self.fp8 = self.x.to(torch.float8_e4m3fn), torch.ones(scales, device=device)
        scores = torch.rand(options.tokens, options.experts, device=device, generator=generator)
        self.topk_idx = scores.topk(options.topk, dim=1).indices
        self.weights = torch.ones(self.topk_idx.shape, device=device)
        self.per_rank, _, self.per_expert, self.in_rank, _ = self.layout()
        self.rows, _, self.recv_weights, _, self.handle, _ = self.dispatch()

    def operations(self) -> dict[str, Callable[[], object]]:
        return {
            "layout": self.layout,
            "dispatch, new": self.dispatch,
            "dispatch, handle": lambda: self.buffer.dispatch(self.x, self.handle),
            "dispatch, handle, fp8": lambda: self.buffer.dispatch(self.fp8, self.handle),
            "combine": lambda: self.buffer.combine(self.rows, self.handle),
            "combine, weights": lambda: self.buffer.combine(
                self.rows, self.handle, self.recv_weights
            ),
            "dispatch, low latency": self.low_latency,
        }

    def layout(self) -> Any:
        return self.buffer.get_dispatch_layout(self.topk_idx, self.options.experts)

    def dispatch(self) -> Any:
        return self.buffer.dispatch(
            self.x,
            num_tokens_per_rank=self.per_rank,
            num_tokens_per_expert=self.per_expert,
            is_token_in_rank=self.in_rank,
            topk_idx=self.topk_idx,
            topk_weights=self.weights,
            config=self.config,
        )

    def low_latency(self) -> Any:
        few = min(self.options.tokens, 128)
        return self.buffer.low_latency_dispatch(
            self.x[:few], self.topk_idx[:few], 128, self.options.experts
        )

    def settle(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()
        dist.barrier()

    def measure(self, call: Callable[[], object]) -> dict[str, float]:
        """Microseconds, and counts."""
        found: dict[str, list[float]] = {"returns": [], "in a row": [], "events": []}
        for iteration in range(self.options.iterations):
            self.settle()
            if self.cuda:
                begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                begin.record()
            began = time.perf_counter()
            call()
            found["returns"].append((time.perf_counter() - began) * 1e6)
            if self.cuda:
                end.record()
                end.synchronize()
                found["events"].append(begin.elapsed_time(end) * 1e3)
            if iteration % 10 == 0:
                self.settle()
                began = time.perf_counter()
                for _ in range(IN_A_ROW):
                    call()
                found["in a row"].append((time.perf_counter() - began) / IN_A_ROW * 1e6)
        self.settle()
        with Functions() as functions:
            call()
        with Operators() as operators:
            call()
        times = {name: statistics.median(all_of) for name, all_of in found.items() if all_of}
        return {**times, "functions": functions.count, "operators": operators.count}


def run_rank(rank: int, options: argparse.Namespace) -> None:
    cuda = options.device == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    else:
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        torch.set_num_threads(1)
    dist.init_process_group("nccl" if cuda else "gloo")
    lines: list[list[str]] = []
    calls = Calls(options, rank)
    for default in (None, options.device):
        for name, call in calls.operations().items():
            call()
            torch.set_default_device(default)
            mine = calls.measure(call)
            torch.set_default_device(None)
            of_all: list[Any] = [None] * options.ranks
            dist.all_gather_object(of_all, mine)
            worst = [f"{max(one[key] for one in of_all):.1f}" for key in mine]
            lines.append([name, default or "none", *worst])
    calls.buffer.destroy()
    if rank == 0:
        print(f"{options}; torch {torch.__version__}; microseconds", flush=True)
        _console.table(("operation", "default device", *mine), lines, right=len(mine))
    dist.destroy_process_group()


def main() -> None:
    options = parse()
    launch.run(options.ranks, run_rank, options)


if __name__ == "__main__":
    main()
