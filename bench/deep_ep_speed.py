#!/usr/bin/env python3
"""Times crossdock.deep_ep.Buffer on the GPUs of this host, one process per GPU.

  PYTHONPATH=build/python deep_ep_speed.py [--ranks 4] [--sms 12,16,20] [--json FILE]

It times one `dispatch` along a handle (of bfloat16 rows; of fp8 rows with row-major scales, and
with column-major ones), one `combine` of bfloat16 rows, or one `get_dispatch_layout`: from an event
before it on the caller's stream to an event behind it, so streams and events of the Buffer are part
of it. Before each iteration the GPUs are made busy until all hosts have enqueued, and then meet in
a small operation. The slowest rank of each iteration counts; p50 and p99 are over the iterations.
Results are compared with their expected values, before and after. To compare: crossdock-bench ep
--device cuda --layout rank, with the same --sms.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable

import torch
import torch.distributed as dist

from crossdock import launch
from crossdock.cli import _console
from crossdock.deep_ep import Buffer, Config

BUSY_CYCLES = 1_000_000  # half a millisecond: longer than a host needs to enqueue one iteration
COPIES = 3  # copies of the tokens, used in turn; together larger than twice the L2 cache
SCALE_BLOCK = 128  # columns of fp8 rows that share a scale

# The timed operations, by the method of Bench.
OPERATIONS = {
    "dispatch": "dispatch",
    "dispatch fp8": "dispatch_fp8",
    "dispatch fp8 columns": "dispatch_fp8_columns",
    "combine": "combine",
    "layout": "layout",
}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=torch.cuda.device_count())
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=7168)
    parser.add_argument("--experts", type=int, default=256)
    parser.add_argument("--topk", type=int, default=8)
    parser.add_argument("--sms", default="12,16,20,24", help="budgets, comma-separated")
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--warmup", type=int, default=10)
    parser.add_argument("--json", help="file for one object per line")
    options = parser.parse_args()
    if not 1 <= options.ranks <= torch.cuda.device_count():
        parser.error(
            f"--ranks: expected 1 to {torch.cuda.device_count()}, the number of GPUs, "
            f"got {options.ranks}"
        )
    return options


class Bench:
    """One rank's Buffer, its batch, and the operations to time."""

    def __init__(self, options: argparse.Namespace, rank: int, num_sms: int) -> None:
        self.options = options
        self.rank = rank
        self.buffer = Buffer(dist.group.WORLD, explicitly_destroy=True)
        self.config = Config(num_sms)
        generator = torch.Generator("cuda").manual_seed(rank)
        shape = (options.tokens, options.hidden)
        # Small integers: every sum over ranks is exact.
        self.x = [
            torch.randint(-8, 9, shape, device="cuda", generator=generator).bfloat16()
            for _ in range(COPIES)
        ]
        self.fp8 = [one.to(torch.float8_e4m3fn) for one in self.x]
        scales = (options.tokens, options.hidden // SCALE_BLOCK)
        self.scales = [
            torch.rand(scales, device="cuda", generator=generator) for _ in range(COPIES)
        ]
        self.columns = [one.t().contiguous().t() for one in self.scales]
        scores = torch.rand(options.tokens, options.experts, device="cuda", generator=generator)
        self.topk_idx = scores.topk(options.topk, dim=1).indices
        self.rows, self.handle, self.in_rank = self._dispatch(self.x[0], self.topk_idx)
        # The meeting in front of each iteration.
        self._first = self.x[0][:1].clone()
        _, self._meeting, _ = self._dispatch(self._first, self.topk_idx[:1])

    def _dispatch(self, x: torch.Tensor, topk_idx: torch.Tensor):
        per_rank, _, per_expert, in_rank, _ = self.buffer.get_dispatch_layout(
            topk_idx, self.options.experts
        )
        weights = torch.ones(topk_idx.shape, device="cuda")
        rows, *_, handle, _ = self.buffer.dispatch(
            x,
            num_tokens_per_rank=per_rank,
            num_tokens_per_expert=per_expert,
            is_token_in_rank=in_rank,
            topk_idx=topk_idx,
            topk_weights=weights,
            config=self.config,
        )
        return rows, handle, in_rank

    def dispatch(self, iteration: int) -> None:
        self.rows, *_ = self.buffer.dispatch(
            self.x[iteration % COPIES], self.handle, config=self.config
        )

    def dispatch_fp8(self, iteration: int) -> None:
        self._dispatch_pair(iteration, self.scales)

    def dispatch_fp8_columns(self, iteration: int) -> None:
        self._dispatch_pair(iteration, self.columns)

    def _dispatch_pair(self, iteration: int, scales: list[torch.Tensor]) -> None:
        copy = iteration % COPIES
        self.pair, *_ = self.buffer.dispatch(
            (self.fp8[copy], scales[copy]), self.handle, config=self.config
        )

    def layout(self, iteration: int) -> None:
        self.buffer.get_dispatch_layout(self.topk_idx, self.options.experts)

    def combine(self, iteration: int) -> None:
        self.combined, *_ = self.buffer.combine(self.rows, self.handle, config=self.config)

    def check(self, copy: int) -> None:
        """Combining what was dispatched gives each token once per rank that it went to.

        And both forms of scales arrive with the same rows.
        """
        self.dispatch(copy)
        self.dispatch_fp8(copy)
        rows, scales = self.pair
        self.dispatch_fp8_columns(copy)
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

    def times(self, operation: Callable[[int], None]) -> list[float]:
        """Microseconds of every iteration, the slowest rank's."""
        events = []
        total = self.options.warmup + self.options.iterations
        for iteration in range(total):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(BUSY_CYCLES)
            self.buffer.dispatch(self._first, self._meeting)
            begin.record()
            operation(iteration)
            end.record()
            events.append((begin, end))
            torch.cuda.synchronize()
            dist.barrier()
        mine = torch.tensor(
            [begin.elapsed_time(end) * 1000 for begin, end in events], device="cuda"
        )[self.options.warmup :]
        dist.all_reduce(mine, dist.ReduceOp.MAX)
        return mine.tolist()


def measure(options: argparse.Namespace, rank: int, num_sms: int) -> list[dict[str, object]]:
    """All operations with one budget."""
    bench = Bench(options, rank, num_sms)
    results = []
    for name, method in OPERATIONS.items():
        bench.check(0)
        times = bench.times(getattr(bench, method))
        bench.pair = None
        bench.check(COPIES - 1)
        results.append(
            {
                "operation": name,
                "through": "deep_ep.Buffer",
                "sms": num_sms,
                "p50_us": round(statistics.median(times), 1),
                "p99_us": round(statistics.quantiles(times, n=100)[98], 1),
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
    for num_sms in (int(text) for text in options.sms.split(",")):
        lines += measure(options, rank, num_sms)
    if rank == 0:
        keys = ("operation", "sms", "p50_us", "p99_us")
        cells = [[str(line[key]) for key in keys] for line in lines]
        _console.table(("operation", "SMs", "p50 us", "p99 us"), cells, right=3)
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
