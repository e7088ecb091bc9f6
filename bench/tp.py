#!/usr/bin/env python3
"""Times products of matrices that are spread over ranks, from C, PyTorch and JAX, in one run.

  PYTHONPATH=build/python bench/tp.py [--device cpu] [--ranks 2] [--json FILE]

Beside them the product alone, a collective of torch.distributed and the product one after the
other, and on GPUs torch's own ways by its symmetric memory: its fused operators and, as it has none
that ends with an all-reduce, the product before its one-shot and its two-shot one. Nothing uses
NVLink multicast. Ways take rounds in turn, so that they meet the same machine. A sample is a number
of calls in a row, from a barrier until the device has finished, over that number; a time is that of
the slowest rank. Results are compared first. A second table has the host's time for a call of one
rank with a handful of tokens, beside an operator that does nothing.
The C API's own program, with all algorithms: crossdock-bench gemm.
"""

from __future__ import annotations

import argparse
import datetime
import os
import pathlib
import time
from collections.abc import Iterator
from typing import Any

from crossdock import launch
from crossdock.cli import _console, _host, _report, _usage
from tp_problem import Problem, Way, read_shapes

ROUNDS = 5  # the ways take them in turn
COLUMNS = ("shape", "tokens", "way", "p50_us", "p99_us", "x product", "host_us")
HOST_COLUMNS = ("operation", "gradients", "call_us", "empty_us", "beyond_us")


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--ranks", type=_usage.number(1), default=2)
    parser.add_argument("--shapes", default="70b", help="as of crossdock-bench gemm")
    parser.add_argument(
        "--tokens", type=_usage.numbers(1), default=[512, 2048], help="of all ranks"
    )
    parser.add_argument("--dtype", choices=["bf16", "fp16", "fp32"], help="cpu: fp32; cuda: bf16")
    parser.add_argument("--calls", type=_usage.number(1), default=10, help="calls of a sample")
    parser.add_argument("--iters", type=_usage.number(1), default=20, help="samples in all")
    parser.add_argument("--no-jax", action="store_true", help="where it is not installed")
    parser.add_argument("--json", type=pathlib.Path, help="file for all rows")
    options = parser.parse_args()
    options.dtype = options.dtype or {"cpu": "fp32", "cuda": "bf16"}[options.device]
    try:
        options.problems = problems(options)
    except ValueError as error:
        parser.error(str(error))
    return options


def problems(options: argparse.Namespace) -> list[Problem]:
    """Every shape with every number of tokens."""
    ranks = options.ranks
    for tokens in options.tokens:
        if tokens % ranks:
            raise ValueError(f"--tokens: expected multiples of the {ranks} ranks, got {tokens}")
    return [
        Problem(*shape, tokens=tokens, ranks=ranks, dtype=options.dtype)
        for text in options.shapes.split(",")
        for shape in read_shapes(text, ranks)
        for tokens in options.tokens
    ]


# ---- On a rank -----------------------------------------------------------------------------------


def set_up(options: argparse.Namespace) -> None:
    """Sets what torch and JAX read when they are imported: they share cores and GPUs."""
    os.environ["OMP_NUM_THREADS"] = str(max(1, _host.cores() // options.ranks))
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    os.environ["NCCL_NVLS_ENABLE"] = "0"  # multicast, which the library has no use for
    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    if options.device == "cpu":
        os.environ["JAX_PLATFORMS"] = "cpu"


class Rank:
    """One rank, which makes every product in all ways."""

    def __init__(self, rank: int, options: argparse.Namespace, port: int) -> None:
        set_up(options)
        import torch
        import torch.distributed as dist

        import crossdock.torch as xd

        self.options, self.dist = options, dist
        self.versions = {"torch": torch.__version__}
        dist.init_process_group("nccl" if options.device == "cuda" else "gloo")
        self.comm = xd.init(device=None if options.device == "cuda" else "cpu")
        if options.device == "cuda":
            torch.cuda.set_device(self.comm.device)
        self.jax = None
        if not options.no_jax:
            import jax

            from tp_jax import JaxRanks

            self.jax = JaxRanks(options.device, rank, options.ranks, port)
            self.versions["jax"] = jax.__version__

    def close(self) -> None:
        if self.jax:
            self.jax.close()
        self.comm.close()
        self.dist.destroy_process_group()

    def measure(self, p: Problem) -> dict[str, dict[str, list[float]]]:
        """By way seconds per product, of the whole and on the host, sample by sample."""
        from tp_torch import TorchWays

        ways = list(TorchWays(p, self.comm).ways())
        if self.jax:
            ways += self.jax.ways(p, self.options.calls)
        self._compare(p, ways)
        found = {way.name: {"seconds": [], "host": []} for way in ways}
        rounds = min(ROUNDS, self.options.iters)
        for turn in range(rounds):
            for way in ways:
                self._sample(way)  # warms up
                for _ in range(turn, self.options.iters, rounds):
                    seconds, host = self._sample(way)
                    found[way.name]["seconds"].append(seconds)
                    found[way.name]["host"].append(host)
        return found

    def _sample(self, way: Way) -> tuple[float, float]:
        times = max(1, self.options.calls // way.products)
        self.comm.barrier()
        began = time.perf_counter()
        for _ in range(times):
            found = way.call()
        called = time.perf_counter()
        way.finish(found)
        ended = time.perf_counter()
        return tuple((end - began) / (times * way.products) for end in (ended, called))

    def _compare(self, p: Problem, ways: list[Way]) -> None:
        """All ways have one result, but for what is rounded in other places."""
        wanted = None
        for way in ways:
            found = way.call()
            way.finish(found)
            if way.result is None:
                continue
            result = way.result(found)
            wanted = result.clone() if wanted is None else wanted
            apart = float((result - wanted).norm() / wanted.norm())
            if not apart <= {"fp32": 1e-5, "fp16": 2e-3, "bf16": 1e-2}[p.dtype]:
                raise SystemExit(f"{p}: {way.name} is {apart:.1e} away from {ways[0].name}")


def run_rank(rank: int, options: argparse.Namespace, port: int) -> dict[str, Any]:
    """Its times, problem by problem."""
    one = Rank(rank, options, port)
    try:
        return {"cases": list(map(one.measure, options.problems)), "versions": one.versions}
    finally:
        one.close()


def run_host(rank: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The host's time for a call, by one rank alone."""
    set_up(options)
    import torch

    import python_overhead

    device = torch.device(options.device)
    rows = [{**row, "op": f"torch {row['op']}"} for row in python_overhead.measure_products(device)]
    return rows if options.no_jax else rows + list(host_of_jax(device))


def host_of_jax(device: Any) -> Iterator[dict[str, Any]]:
    """Calls of compiled programs. On the CPU until they have ended, else calls would queue up."""
    import jax

    import python_overhead
    import tp_jax

    ranks = tp_jax.JaxRanks(device.type, 0, 1, 0)
    try:
        for operation, function in tp_jax.FUNCTIONS.items():
            calls = tp_jax.host_calls(Problem("", operation, 64, 64, 4, 1, "fp32"))
            if device.type == "cpu":
                calls = [lambda call=call: jax.block_until_ready(call()) for call in calls]
            ours, empty = python_overhead.microseconds(calls, device)
            times = {"call_us": ours, "empty_us": empty, "beyond_us": ours - empty}
            yield {"op": f"jax {function.__name__}", "grad": False, **times}
    finally:
        ranks.close()


# ---- The tables ----------------------------------------------------------------------------------


def rows_of(p: Problem, by_rank: list[dict[str, Any]], device: str) -> list[dict[str, Any]]:
    """A row for each way, of the slowest rank's times. On the CPU the host makes the product."""
    rows = []
    for way in by_rank[0]:
        seconds = _report.slowest([one[way]["seconds"] for one in by_rank])
        row = {**p._asdict(), "way": way}
        row |= {
            f"p{share}_us": _report.percentile(seconds, share / 100) * 1e6 for share in (50, 99)
        }
        if device == "cuda":
            row["host_us"] = _report.percentile(by_rank[0][way]["host"], 0.5) * 1e6
        rows.append(row)
    alone = next(row["p50_us"] for row in rows if row["way"] == "product alone")
    return [row | {"x product": row["p50_us"] / alone} for row in rows]


def show(columns: tuple[str, ...], rows: list[dict[str, Any]], right: int) -> None:
    def cell(found: Any) -> str:
        return f"{found:.2f}" if isinstance(found, float) else str(found)

    _console.table(columns, [[cell(row.get(c, "-")) for c in columns] for row in rows], right=right)


def main() -> None:
    options = parse()
    doubts = _host.doubts(options.ranks, options.device)
    ranks = launch.run(options.ranks, run_rank, options, launch.free_port())
    rows = [
        row
        for i, p in enumerate(options.problems)
        for row in rows_of(p, [rank["cases"][i] for rank in ranks], options.device)
    ]
    title = (
        f"bench/tp.py: {options.ranks} processes, {options.device}, {options.dtype}, "
        f"{options.iters} samples of {options.calls} calls"
    )
    _report.show_head(title, ranks[0]["versions"], doubts)
    print()
    show(COLUMNS, rows, 4)
    host = launch.run(1, run_host, options)[0]
    print(
        "\nThe host's time for a call of one rank with a handful of tokens, beside an empty one:\n"
    )
    show(
        HOST_COLUMNS,
        [
            {**row, "operation": row["op"], "gradients": "yes" if row["grad"] else "no"}
            for row in host
        ],
        3,
    )
    if options.json:
        head = {"title": title, "machine": _host.processor(), "doubts": doubts}
        head |= {"date": datetime.date.today().isoformat(), "versions": ranks[0]["versions"]}
        _report.write_json({**head, "rows": rows, "host": host}, options.json)


if __name__ == "__main__":
    main()
