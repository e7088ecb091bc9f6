"""A rank of torch's all_to_all_single over gloo, as bench/net/run.py starts it.

It moves the rows that a dispatch moves, once for each destination rank: packed by index_select,
exchanged, and unpacked by index_copy_ into rows of a tensor, which is less than a dispatch does.
Combine is the way back, without the sums. Rank 0 prints lines of JSON, as the other ranks do.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
import torch.distributed as dist


def common_start(rank: int) -> float:
    """A moment from which all ranks count: they are on one machine, and have one clock."""
    dist.barrier()
    start = torch.tensor([time.monotonic() + 0.002], dtype=torch.float64)
    dist.broadcast(start, 0)
    while time.monotonic() < start.item():
        time.sleep(0)
    return float(start.item())


def measure(step: str, body: Callable[[], object], rank: int, iters: int, warmup: int) -> None:
    """Times a step; rank 0 prints the maximum over the ranks, and their seconds of processor."""
    seconds, processor = [], []
    for i in range(-warmup, iters):
        start = common_start(rank)
        begun = time.process_time()
        body()
        if i >= 0:
            seconds.append(time.monotonic() - start)
            processor.append(time.process_time() - begun)
    slowest = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    together = torch.tensor(processor, dtype=torch.float64)
    dist.all_reduce(together)
    if rank == 0:
        line = {"step": step, "seconds": slowest.tolist(), "cpu": together.tolist()}
        print(json.dumps(line), flush=True)


def main() -> None:
    """Measures dispatch and combine."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rows", required=True, help="JSON: rows [source][destination]")
    parser.add_argument("--row-bytes", type=int, required=True)
    parser.add_argument("--tokens", type=int, required=True)
    parser.add_argument("--iters", type=int, required=True)
    parser.add_argument("--warmup", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, rows = dist.get_rank(), json.loads(options.rows)
    out = [0 if peer == rank else n for peer, n in enumerate(rows[rank])]
    coming = [0 if peer == rank else of_peer[rank] for peer, of_peer in enumerate(rows)]
    tokens = torch.ones(options.tokens, options.row_bytes, dtype=torch.uint8)
    arrived = torch.empty(sum(coming), options.row_bytes, dtype=torch.uint8)
    received = torch.empty_like(arrived)
    back = torch.empty(sum(out), options.row_bytes, dtype=torch.uint8)
    picks = torch.arange(sum(out)) % options.tokens
    places = torch.randperm(sum(coming), generator=torch.Generator().manual_seed(1))

    def dispatch() -> None:
        packed = tokens.index_select(0, picks)
        dist.all_to_all_single(arrived, packed, coming, out)
        received.index_copy_(0, places, arrived)

    def combine() -> None:
        packed = received.index_select(0, places)
        dist.all_to_all_single(back, packed, out, coming)

    for step, body in (("dispatch", dispatch), ("combine", combine)):
        measure(step, body, rank, options.iters, options.warmup)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
