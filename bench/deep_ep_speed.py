#!/usr/bin/env python3
"""Times crossdock.deep_ep on the GPUs of this host, one process per GPU.

  PYTHONPATH=build/python deep_ep_speed.py [--ranks 4] [--sms 12,16,20] [--json FILE]
  PYTHONPATH=build/python deep_ep_speed.py --through few-by-rank,few-by-expert --tokens 128

Of Buffer it times one `dispatch` along a handle (of bfloat16 rows; of fp8 rows with row-major
scales, and with column-major ones), one `combine` of bfloat16 rows, or one `get_dispatch_layout`:
from an event before it on the caller's stream to an event behind it, so streams and events of the
Buffer are part of it. Before each iteration the GPUs are made busy until all hosts have enqueued,
and then meet in a small operation. The slowest rank of each iteration counts; p50 and p99 are over
the iterations. Results are compared with their expected values, before and after. To compare:
crossdock-bench ep --device cuda --layout rank, with the same --sms.

"elastic" is ElasticBuffer with `do_expand` (dispatch along a handle; compare with --layout expert).
"few-by-rank" and "few-by-expert" are its few tokens (a new dispatch; compare with crossdock-bench
ll --device cuda --receive by_rank or by_expert), which take as many multiprocessors as serve.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from crossdock import launch
from crossdock._core import constants
from crossdock.cli import _console
from deep_ep_batch import BufferBatch, add_sizes
from deep_ep_elastic import COPIES, ElasticBench, FewByExpert, FewByRank

BUSY_CYCLES = 1_000_000  # half a millisecond: longer than a host needs to enqueue one iteration


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument(
        "--through", default="buffer", help=f"comma-separated: {', '.join(BENCHES)}"
    )
    parser.add_argument("--sms", default="12,16,20,24", help="budgets, comma-separated")
    add_sizes(parser, tokens=4096)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--json", help="file for one object per line")
    options = parser.parse_args()
    if not 1 <= options.ranks <= torch.cuda.device_count():
        parser.error(
            f"--ranks: expected 1 to {torch.cuda.device_count()}, the number of GPUs, "
            f"got {options.ranks}"
        )
    options.through = options.through.split(",")
    for name in options.through:
        if name not in BENCHES:
            parser.error(f"--through: expected {', '.join(BENCHES)}, got {name}")
        if BENCHES[name].few and options.tokens > constants.LL_MAX_TOKENS:
            most = constants.LL_MAX_TOKENS
            parser.error(f"--tokens: expected at most {most} with {name}, got {options.tokens}")
    return options


class Bench(BufferBatch):
    """One rank's Buffer, its batch, and the operations to time, by their methods."""

    few = False
    operations = {
        "dispatch": "along",
        "dispatch fp8": "along_fp8",
        "dispatch fp8 columns": "along_fp8_columns",
        "combine": "combine",
        "layout": "find_layout",
    }

    def __init__(self, options: argparse.Namespace, rank: int, num_sms: int) -> None:
        super().__init__(options, rank, num_sms, COPIES)
        self.rank = rank
        self.columns = [(rows, scales.t().contiguous().t()) for rows, scales in self.fp8]
        found = self.layout()
        self.in_rank = found["is_token_in_rank"]
        self.rows, *_, self.handle, _ = self.dispatch(found)
        # The meeting in front of each iteration.
        self._first = self.x[0][:1].clone()
        *_, self._meeting, _ = self.dispatch(self.layout(1), 1)

    def along(self, iteration: int) -> None:
        self.rows, *_ = self.buffer.dispatch(
            self.x[iteration % COPIES], self.handle, config=self.config
        )

    def along_fp8(self, iteration: int) -> None:
        self._along_pair(self.fp8[iteration % COPIES])

    def along_fp8_columns(self, iteration: int) -> None:
        self._along_pair(self.columns[iteration % COPIES])

    def _along_pair(self, pair: tuple[torch.Tensor, torch.Tensor]) -> None:
        self.pair, *_ = self.buffer.dispatch(pair, self.handle, config=self.config)

    def find_layout(self, iteration: int) -> None:
        self.buffer.get_dispatch_layout(self.topk_idx, self.options.experts)

    def combine(self, iteration: int) -> None:
        self.combined, *_ = self.buffer.combine(self.rows, self.handle, config=self.config)

    def check(self, copy: int) -> None:
        """Combining what was dispatched gives each token once per rank that it went to.

        And both forms of scales arrive with the same rows.
        """
        self.along(copy)
        self.along_fp8(copy)
        rows, scales = self.pair
        self.along_fp8_columns(copy)
        same = (
            torch.equal(rows.bfloat16(), self.rows)
            and torch.equal(self.pair[0].bfloat16(), self.rows)
            and torch.equal(self.pair[1], scales)
        )
        del rows, scales, self.pair
        self.combine(copy)
        want = self.x[copy] * self.in_rank.sum(1, keepdim=True)
        if not same or not torch.equal(self.combined, want):
            raise SystemExit(f"rank {self.rank}: wrong result")

    def meet(self) -> None:
        self.buffer.dispatch(self._first, self._meeting)


BENCHES: dict[str, Any] = {
    "buffer": Bench,
    "elastic": ElasticBench,
    "few-by-rank": FewByRank,
    "few-by-expert": FewByExpert,
}


def times(options: argparse.Namespace, bench: Any, operation: Callable[[int], None]) -> list[float]:
    """Microseconds of every iteration, the slowest rank's."""
    events = []
    for iteration in range(options.warmup + options.iterations):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda._sleep(BUSY_CYCLES)
        bench.meet()
        begin.record()
        operation(iteration)
        end.record()
        events.append((begin, end))
        torch.cuda.synchronize()
        dist.barrier()
    found = [begin.elapsed_time(end) * 1000 for begin, end in events[options.warmup :]]
    mine = torch.tensor(found, device="cuda")
    dist.all_reduce(mine, dist.ReduceOp.MAX)
    return mine.tolist()


def measure(
    options: argparse.Namespace, rank: int, through: str, num_sms: int
) -> list[dict[str, object]]:
    """All operations with one budget."""
    bench = BENCHES[through](options, rank, num_sms)
    results = []
    for name, method in bench.operations.items():
        bench.check(0)
        found = times(options, bench, getattr(bench, method))
        bench.pair = None
        bench.check(COPIES - 1)
        results.append(
            {
                "operation": name,
                "through": "deep_ep.Buffer" if through == "buffer" else through,
                "sms": num_sms,
                "p50_us": round(statistics.median(found), 1),
                "p99_us": round(statistics.quantiles(found, n=100)[98], 1),
                "received_rows": len(bench.rows),
                **{
                    key: getattr(options, key)
                    for key in ("ranks", "tokens", "hidden", "experts", "topk", "iterations")
                },
            }
        )
    bench.buffer.destroy()
    return results


def run_rank(rank: int, options: argparse.Namespace) -> None:
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
    lines = []
    if rank == 0:
        print(
            f"{options.ranks} x {torch.cuda.get_device_name()}, torch {torch.__version__}, "
            f"T={options.tokens} H={options.hidden} K={options.topk} E={options.experts} bf16, "
            f"{options.iterations} iterations",
            flush=True,
        )
    for through in options.through:
        budgets = [0] if BENCHES[through].few else map(int, options.sms.split(","))
        for num_sms in budgets:
            lines += measure(options, rank, through, num_sms)
    if rank == 0:
        keys = ("through", "operation", "sms", "p50_us", "p99_us")
        cells = [[str(line[key]) for key in keys] for line in lines]
        _console.table(("through", "operation", "SMs", "p50 us", "p99 us"), cells, right=3)
    if rank == 0 and options.json:
        with open(options.json, "w", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
    dist.destroy_process_group()


def main() -> None:
    options = parse()
    os.environ.setdefault("XD_TIMEOUT_MS", "60000")
    launch.run(options.ranks, run_rank, options)


if __name__ == "__main__":
    main()
