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
from deep_ep_batch import BufferBatch, add_sizes

IN_A_ROW = 20


def parse() -> argparse.Namespace:
    gpus = torch.cuda.device_count()
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cuda" if gpus else "cpu", choices=("cpu", "cuda"))
    parser.add_argument("--ranks", type=int, default=min(gpus, 2) or 2)
    parser.add_argument("--sms", type=int, default=24)
    add_sizes(parser, tokens=128)
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


class Calls(BufferBatch):
    """One rank's Buffer and batch, and the operations to time, by name."""

    def __init__(self, options: argparse.Namespace, rank: int) -> None:
        super().__init__(options, rank, options.sms, low_latency_mode=True)
        self.found = self.layout()
        self.rows, _, self.recv_weights, _, self.handle, _ = self.dispatch(self.found)

    def operations(self) -> dict[str, Callable[[], object]]:
        return {
            "layout": lambda: self.buffer.get_dispatch_layout(self.topk_idx, self.options.experts),
            "dispatch, new": lambda: self.dispatch(self.found),
            "dispatch, handle": lambda: self.buffer.dispatch(self.x[0], self.handle),
            "dispatch, handle, fp8": lambda: self.buffer.dispatch(self.fp8[0], self.handle),
            "combine": lambda: self.buffer.combine(self.rows, self.handle),
            "combine, weights": lambda: self.buffer.combine(
                self.rows, self.handle, self.recv_weights
            ),
            "dispatch, low latency": self.low_latency,
        }

    def low_latency(self) -> Any:
        few = min(self.options.tokens, 128)
        return self.buffer.low_latency_dispatch(
            self.x[0][:few], self.topk_idx[:few], 128, self.options.experts
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
