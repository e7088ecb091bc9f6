#!/usr/bin/env python3
"""Times the operations of crossdock.jax on the GPUs of this host, or on parts of its CPU.

  PYTHONPATH=build/python jax_ep.py [--processes] [--in-place] [--ranks 4] [--json FILE]

One compiled program runs an operation many times, each after the one before; the program's time per
operation counts, so with all that XLA does between two: p50 and p99 over the programs' runs.
Results are compared with their expected values first. To compare, the same sizes of the C API:
crossdock-bench ep --device cuda --staged, and without --staged for --in-place, which makes XLA's
memory pool part of symmetric memory.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from typing import Any

from crossdock import launch
from crossdock.cli import _console

COLUMNS = ("operation", "mode", "ranks", "p50_us", "p99_us")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", type=int, default=0, help="multiprocessors; 0 = as many as suit")
    parser.add_argument("--calls", type=int, default=100, help="operations of a program")
    parser.add_argument("--iterations", type=int, default=20, help="runs of a program")
    parser.add_argument("--processes", action="store_true", help="one per device")
    parser.add_argument("--in-place", action="store_true", help="register XLA's memory pool")
    parser.add_argument("--json", help="file for one object per line")
    return parser.parse_args()


class Bench:
    """The batch on a mesh of all ranks, and programs that repeat one operation."""

    def __init__(self, options: argparse.Namespace) -> None:
        import jax
        import jax.numpy as jnp
        import numpy as np

        import crossdock.jax as xd

        self.jax, self.jnp, self.xd, self.options = jax, jnp, xd, options
        self.mesh = jax.sharding.Mesh(np.array(jax.devices()[: options.ranks]), ("ep",))
        self.ep = xd.init(self.mesh, "ep")
        if options.in_place:
            self.ep.register_memory()
        rows = options.ranks * options.tokens
        rng = np.random.default_rng(1)
        scores = rng.random((rows, options.experts), np.float32)
        ids = np.argpartition(scores, options.topk, axis=1)[:, : options.topk].astype(np.int32)
        # Receive arrays have next to no rows beyond those that routing fills, since those are
        # zeroed each time.
        fullest = np.bincount(ids.ravel() * options.ranks // options.experts).max()
        self.config = xd.EpConfig(
            num_experts=options.experts,
            hidden=options.hidden,
            max_topk=options.topk,
            max_tokens_per_rank=options.tokens,
            num_sms=options.sms,
            recv_capacity=int(fullest),
        )
        # Small integers: sums over experts are exact.
        x = rng.integers(-4, 5, (rows, options.hidden), np.int8).astype(jnp.bfloat16)
        self.weights = self.put(np.full((rows, options.topk), 1 / 8, np.float32))
        self.ids, self.x = self.put(ids), self.put(x)
        self.check()

    def put(self, array: Any) -> Any:
        parts = self.jax.sharding.PartitionSpec("ep")
        sharding = self.jax.sharding.NamedSharding(self.mesh, parts)
        return self.jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])

    def on_ranks(self, function: Callable[..., Any]) -> Callable[..., Any]:
        spec = self.jax.sharding.PartitionSpec("ep")
        return self.jax.jit(
            self.jax.shard_map(
                function, mesh=self.mesh, in_specs=spec, out_specs=spec, check_vma=False
            )
        )

    def check(self) -> None:
        """A round trip gives each token its weights' sum times itself."""
        xd = self.xd

        def trip(ids, x, weights):
            tokens, weights, _, plan = xd.ep_dispatch(xd.ep_prepare(self.config, ids), x, weights)
            return (xd.ep_combine(plan, tokens, weights)[0] != x * weights_sum).sum()[None]

        weights_sum = self.options.topk / 8
        wrong = self.on_ranks(trip)(self.ids, self.x, self.weights)
        self.ep.check()
        for shard in wrong.addressable_shards:
            if int(shard.data[0]):
                raise SystemExit(f"{shard.device}: {int(shard.data[0])} elements are wrong")

    def programs(self) -> dict[str, tuple[Callable[..., Any], tuple[Any, ...]]]:
        """By operation a program that runs it `calls` times, and its arguments."""
        xd, calls = self.xd, self.options.calls

        def repeated(operation):
            """`operation(order, ...) -> order`, again and again, as a model's layers do."""

            def program(order, *arguments):
                for _ in range(calls):
                    order = operation(order, *arguments)
                return order

            return self.on_ranks(program)

        def prepare(order, ids):
            return xd.ep_prepare(self.config, ids, after=order).order

        def dispatch(order, plan, x, weights):
            return xd.ep_dispatch(plan.after(order), x, weights).plan.order

        def combine(order, plan, rows, weights):
            return xd.ep_combine(plan.after(order), rows, weights)[1].order

        plan = self.on_ranks(lambda ids: xd.ep_prepare(self.config, ids))(self.ids)
        received = self.on_ranks(xd.ep_dispatch)(plan, self.x, self.weights)
        order = plan.order
        return {
            "prepare": (repeated(prepare), (order, self.ids)),
            "dispatch": (repeated(dispatch), (order, plan, self.x, self.weights)),
            "combine": (repeated(combine), (order, plan, received.tokens, received.weights)),
        }

    def measure(self) -> list[dict[str, Any]]:
        """Rows of the table, from this process's ranks."""
        mode = "in place" if self.options.in_place else "staged"
        rows = []
        for name, (program, arguments) in self.programs().items():
            samples = []
            for iteration in range(self.options.iterations + 2):  # two warm up
                began = time.perf_counter()
                self.jax.block_until_ready(program(*arguments))
                if iteration >= 2:
                    samples.append((time.perf_counter() - began) / self.options.calls * 1e6)
            samples.sort()
            rows.append(
                {
                    "operation": name,
                    "mode": mode,
                    "ranks": self.options.ranks,
                    "p50_us": round(statistics.median(samples), 1),
                    "p99_us": round(samples[int(0.99 * (len(samples) - 1))], 1),
                }
            )
        self.ep.check()
        return rows


def run(rank: int, options: argparse.Namespace, port: int) -> None:
    """One process of the bench; the first one prints."""
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"
        count = 1 if options.processes else options.ranks
        os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={count}"
    import jax

    if options.processes:
        own = [rank] if options.device == "cuda" else None
        jax.distributed.initialize(f"127.0.0.1:{port}", options.ranks, rank, local_device_ids=own)
    bench = Bench(options)
    rows = bench.measure()
    if rank == 0:
        show(options, rows)


def show(options: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    cells = [[str(row[column]) for column in COLUMNS] for row in rows]
    _console.table(COLUMNS, cells, right=len(COLUMNS) - 2)
    if options.json:
        settings = {key: value for key, value in vars(options).items() if key != "json"}
        with open(options.json, "w") as file:
            file.writelines(json.dumps({**settings, **row}) + "\n" for row in rows)


def main() -> None:
    options = parse()
    if options.processes:
        launch.run(options.ranks, run, options, launch.free_port())
    else:
        run(0, options, 0)


if __name__ == "__main__":
    main()
