#!/usr/bin/env python3
"""Times the products of crossdock.torch.tp on the GPUs of this host, or on its CPU.

  PYTHONPATH=build/python bench/torch_tp.py [--device cpu] [--ranks 2] [--json FILE]

Beside them a collective of torch.distributed and torch's product one after the other, and on GPUs
torch's own fused operators. A sample is a number of calls in a row, from a barrier until the device
has finished, over that number: p50 and p99 of the slowest rank. Results are compared first. The
same shapes through the C API: crossdock-bench gemm --device cuda --shapes 70b --tokens 2048.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from crossdock import launch
from crossdock.cli import _console

COLUMNS = ("shape", "tokens", "way", "p50_us", "p99_us")
# Layers of a model with 8192 columns and 28672 inside its MLP: operation, columns of the result and
# inner columns of all ranks, and whether the first or the second of them is spread.
SHAPES = {
    "70b.qkv": ("all_gather", 10240, 8192),
    "70b.fc1": ("all_gather", 28672, 8192),
    "70b.o_proj": ("reduce_scatter", 8192, 8192),
    "70b.fc2": ("reduce_scatter", 8192, 28672),
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", default="512,2048", help="of all ranks, one after another")
    parser.add_argument("--shapes", default=",".join(SHAPES))
    parser.add_argument("--divide", type=int, default=1, help="columns of all shapes by this")
    parser.add_argument("--calls", type=int, default=10, help="calls of a sample")
    parser.add_argument("--iterations", type=int, default=20, help="samples")
    parser.add_argument("--json", help="file for one object per line")
    return parser.parse_args()


class Rank:
    """One rank's matrices, and the ways to multiply them."""

    def __init__(self, options: argparse.Namespace) -> None:
        import torch
        import torch.distributed as dist

        import crossdock.torch as xd

        self.torch, self.dist, self.options = torch, dist, options
        self.cuda = options.device == "cuda"
        dist.init_process_group("nccl" if self.cuda else "gloo")
        self.comm = xd.init(device=None if self.cuda else "cpu")
        if self.cuda:
            torch.cuda.set_device(self.comm.device)

    def close(self) -> None:
        self.comm.close()
        self.dist.destroy_process_group()

    def ways(self, operation: str, tokens: int, n: int, k: int) -> dict[str, Callable[[], Any]]:
        """By name what multiplies, each with the same result. Sizes are this rank's."""
        from crossdock.torch import tp

        torch, dist, ranks = self.torch, self.dist, self.comm.num_ranks
        own, gathers = tokens // ranks, operation == "all_gather"
        generator = torch.Generator("cpu").manual_seed(self.comm.rank)
        shape = (own if gathers else tokens, k)

        def whole(*sizes: int) -> Any:
            numbers = torch.randint(-1, 2, sizes, generator=generator, device="cpu")
            return numbers.to(torch.bfloat16).to(self.comm.device)

        a, b = whole(*shape), whole(n, k).t()
        context = tp.TpContext(max_tokens=own, max_k=max(k, n), max_n=n, comm=self.comm)
        call = tp.all_gather_matmul if gathers else tp.matmul_reduce_scatter
        rows = a.new_empty(tokens, k)
        out = a.new_empty(own, n)
        name = dist.group.WORLD.group_name

        def one_after_the_other() -> Any:
            if gathers:
                dist.all_gather_into_tensor(rows, a)
                return rows @ b
            dist.reduce_scatter_tensor(out, a @ b)
            return out

        ways = {"crossdock, eager": lambda: call(a, b, context)}
        if self.cuda:
            import torch.distributed._symmetric_memory as symmetric_memory

            symmetric_memory.enable_symm_mem_for_group(name)
            ways["crossdock, graph"] = self._captured(ways["crossdock, eager"])
            ways["torch's fused"] = (
                (lambda: torch.ops.symm_mem.fused_all_gather_matmul(a, [b], 0, name)[1][0])
                if gathers
                else (lambda: torch.ops.symm_mem.fused_matmul_reduce_scatter(a, b, "sum", 0, name))
            )
        ways["one after the other"] = one_after_the_other
        return ways

    def _captured(self, call: Callable[[], Any]) -> Callable[[], Any]:
        torch = self.torch
        call()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = call()

        def replay() -> Any:
            graph.replay()
            return out

        return replay

    def measure(self, shape: str, tokens: int) -> Iterator[dict[str, Any]]:
        """A row for each way that can run here."""
        torch, options = self.torch, self.options
        operation, n, k = SHAPES[shape]
        ranks, scale = self.comm.num_ranks, options.divide
        n, k = n // scale, k // scale
        n, k = (n // ranks, k) if operation == "all_gather" else (n, k // ranks)
        ways = self.ways(operation, tokens, n, k)
        want = ways["one after the other"]().clone()
        for way, call in ways.items():
            got = call()
            # Products of whole numbers, which bfloat16 rounds in one place or in another.
            torch.testing.assert_close(got, want, rtol=2e-2, atol=2)
            samples = []
            for _ in range(options.iterations + 2):  # two warm up
                self._settle()
                self.comm.barrier()
                began = time.perf_counter()
                for _ in range(options.calls):
                    call()
                self._settle()
                samples.append((time.perf_counter() - began) / options.calls * 1e6)
            slowest = torch.tensor(samples[2:], dtype=torch.float64, device=self.comm.device)
            self.dist.all_reduce(slowest, self.dist.ReduceOp.MAX)
            times = sorted(slowest.tolist())
            row = {"shape": shape, "operation": operation, "tokens": tokens, "n": n, "k": k}
            row |= {"way": way, "p50_us": statistics.median(times), "ranks": ranks}
            yield row | {"p99_us": times[min(len(times) - 1, int(len(times) * 0.99))]}

    def _settle(self) -> None:
        if self.cuda:
            self.torch.cuda.synchronize()


def run_rank(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows, which all ranks know."""
    one = Rank(options)
    try:
        return [
            row
            for shape in options.shapes.split(",")
            for tokens in map(int, options.tokens.split(","))
            for row in one.measure(shape, tokens)
        ]
    finally:
        one.close()


def main() -> None:
    options = parse()
    rows = launch.run(options.ranks, run_rank, options)[0]
    if options.json:
        with open(options.json, "w") as file:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    cells = [
        [f"{row[name]:.1f}" if isinstance(row[name], float) else str(row[name]) for name in COLUMNS]
        for row in rows
    ]
    _console.table(COLUMNS, cells, right=2)


if __name__ == "__main__":
    main()
